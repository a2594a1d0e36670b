use super::{
    super::{
        unpack::Blocks,
        vnni::{Group, Groups, add_fifth_bits, four, four_pairs, nibbles},
    },
    HEADER, codes_at,
    unpack::Affine,
};

impl<const BITS: usize> Groups for Affine<BITS> {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn group(row: *const u8, group: usize) -> Group<1> {
        // SAFETY: the caller has checked the blocks.
        let (codes, [scales, mins]) = unsafe {
            let blocks = row.add(4 * Self::BYTES * group);
            let codes = nibbles(four(blocks.add(const { codes_at(BITS) }), Self::BYTES));
            let codes = if BITS == 5 {
                add_fifth_bits(codes, blocks.add(HEADER), Self::BYTES)
            } else {
                codes
            };
            (codes, four_pairs(blocks, Self::BYTES))
        };
        Group::scaled_from(codes, scales, mins)
    }
}
