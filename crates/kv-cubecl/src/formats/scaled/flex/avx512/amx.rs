//! Scores of an indexer's keys with AMX, which multiplies tiles of 16 rows of 32 channels in bf16.
//!
//! Keys are unpacked to bf16 that include the scales, which are powers of two, so they are exact.
//! Queries are split into one or two digits, as in [`index`](super::index). A tile of keys times a
//! tile of heads gives 16 x 16 products; lanes are heads when they are weighed and summed.

use core::{
    arch::{asm, x86_64::*},
    marker::PhantomData,
    mem::swap,
};
use std::sync::LazyLock;

use super::{LANES, Rows, Scaled, index::weighed, keys::store};
use crate::formats::{
    Codec,
    flex::{IndexHeads, PackedRun},
    scaled::flex::avx512,
};

/// Rows of a tile: keys or heads.
const TILE_ROWS: usize = 16;

/// Channels of a tile.
const TILE_CHANNELS: usize = 32;

/// Tiles of heads whose sums are in registers together.
const HEAD_TILES: usize = 4;

/// Heads whose sums are in registers together.
const HEADS: usize = HEAD_TILES * TILE_ROWS;

/// Tiles of the widest key.
const WIDEST_TILES: usize = 8;

/// Channels of the widest key. All widths are multiples of [`MULTIPLE`].
const WIDEST: usize = WIDEST_TILES * TILE_CHANNELS;

/// Channels that fill a vector as E2M1 codes, and two as E4M3 codes.
const MULTIPLE: usize = 128;

/// The smallest exponent of a scale. Smaller scales count as it, so that the smallest number is
/// normal in bf16; AMX takes others as 0. The error is below 2^-107.
const LOWEST: i8 = -117;

/// A row of a tile. It is a line of the cache, so that it takes one access.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Row([u16; TILE_CHANNELS]);

/// The sums of a key with 16 heads.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Sums([f32; TILE_ROWS]);

const EMPTY: Row = Row([0; TILE_CHANNELS]);

/// Returns whether this processor has the instructions, and Linux lets this process use them.
///
/// The first call asks for that, which has a side effect: from then on, Linux refuses stacks for
/// signal handlers (`sigaltstack`) that are too small for the tiles, 8 KiB.
pub(super) fn available() -> bool {
    static AVAILABLE: LazyLock<bool> = LazyLock::new(|| {
        let has_vectors = avx512::available() && is_x86_feature_detected!("avx512vbmi");
        has_vectors && has_tiles() && permitted()
    });
    *AVAILABLE
}

/// Returns whether the processor, which has AVX-512, has tiles and their products of bf16.
fn has_tiles() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    __cpuid_count(7, 0).edx & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE
}

/// Asks Linux to save the tiles of this process' threads, which it does on request only
/// (Documentation/arch/x86/xstate.rst).
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes numbers, and touches no memory of the process.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// Computes [`CpuCodec::index_scores`](crate::formats::flex::CpuCodec::index_scores). Returns
/// false, without computing it, if the kernel does not support the keys or the heads.
pub(super) fn index_scores<F: Scaled>(
    keys: &PackedRun<'_>,
    heads: &IndexHeads<'_>,
    scores: &mut [f32],
) -> bool {
    let place = &keys.place;
    let serves = avx512::serves(place)
        && matches!(F::FORMAT, Codec::E2m1Blocks | Codec::Mxfp4 | Codec::E4m3Blocks)
        && place.head_dim.is_multiple_of(MULTIPLE)
        && place.head_dim <= WIDEST
        && place.spec.group_size.is_multiple_of(TILE_CHANNELS)
        && avx512::moderate(heads.query)
        && Rows::new(keys).scales_are_moderate::<F>(keys)
        && available();
    if serves {
        let queries = Queries::new(heads, place.head_dim, F::FORMAT);
        // SAFETY: `available` has checked that the processor has the instructions.
        unsafe { score::<F>(keys, &queries, scores) };
    }
    serves
}

/// The queries of all heads as tiles, and their weights, both padded with zeros to whole
/// [`HEADS`].
struct Queries {
    /// Digits of a query: 1, or 2 if one is not exact.
    digits: usize,
    /// By [`HEADS`], digit, tile of channels and [`HEAD_TILES`]: a tile with a row for each pair of
    /// channels, and both channels of each head in it.
    tiles: Vec<Row>,
    weights: Vec<f32>,
}

impl Queries {
    fn new(heads: &IndexHeads<'_>, width: usize, format: Codec) -> Self {
        let n_heads = heads.weights.len().next_multiple_of(HEADS);
        // The upper half of an f32 is a bf16.
        let exact = heads.query.iter().all(|x| x.to_bits() & 0xffff == 0);
        let digits = if exact { 1 } else { 2 };
        let channel_tiles = width / TILE_CHANNELS;
        let mut tiles = vec![EMPTY; n_heads * digits * channel_tiles];
        for at in 0..width {
            let queries = heads.query[channel(format, at)..].iter().step_by(width);
            for (head, &x) in queries.enumerate() {
                let (part, tile, lane) = (head / HEADS, head % HEADS / TILE_ROWS, head % TILE_ROWS);
                let hi = half::bf16::from_f32(x);
                let lo = half::bf16::from_f32(x - hi.to_f32());
                for (digit, x) in [hi, lo].into_iter().enumerate().take(digits) {
                    let channels = (part * digits + digit) * channel_tiles + at / TILE_CHANNELS;
                    let row = (channels * HEAD_TILES + tile) * TILE_ROWS + at % TILE_CHANNELS / 2;
                    tiles[row].0[lane * 2 + at % 2] = x.to_bits();
                }
            }
        }
        let mut weights = heads.weights.to_vec();
        weights.resize(n_heads, 0.0);
        Self { digits, tiles, weights }
    }
}

/// Returns the channel of a number of an unpacked key.
fn channel(format: Codec, at: usize) -> usize {
    let (start, at) = (at / MULTIPLE * MULTIPLE, at % MULTIPLE);
    let (vector, lane) = (at / TILE_CHANNELS, at % TILE_CHANNELS);
    start
        + match format {
            // A vector has the low or high bytes of the 128-bit lanes of 64 codes.
            Codec::E4m3Blocks => vector / 2 * 64 + lane / 8 * 16 + vector % 2 * 8 + lane % 8,
            // A vector has one of four codes of each 16 bits.
            _ => lane * 4 + vector,
        }
}

/// The tile registers of this thread's processor: sums of 16 keys with [`HEADS`] heads in registers
/// 0 to 3, factors in the others. They are released when this is dropped.
///
/// Sums outlive the assembly that wrote them, which Rust does not know of. The compiler itself uses
/// no tiles, but a function of another language may, so none must be called while sums are live.
struct Tiles(PhantomData<*const ()>);

impl Tiles {
    /// # Safety
    /// The processor must have tiles, and this process the permission to use them. The thread must
    /// not have other `Tiles`.
    unsafe fn new() -> Self {
        let mut config = Row([0; TILE_CHANNELS]);
        // Palette 1 has 8 tiles. Their widths in bytes are u16 from byte 16 on, and their heights
        // are bytes from 48 on.
        config.0[0] = 1;
        config.0[8..16].fill(size_of::<Row>() as u16);
        config.0[24..28].fill(u16::from_le_bytes([TILE_ROWS as u8; 2]));
        // SAFETY: the configuration is valid.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) };
        Self(PhantomData)
    }

    /// Sets all sums to 0.
    #[inline(always)]
    fn clear(&self) {
        // SAFETY: the tiles are configured.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nomem, nostack)
            );
        }
    }

    /// Adds the products of 32 channels of 16 keys, in every `stride`-th row, with [`HEADS`] heads.
    #[inline(always)]
    fn multiply(&self, keys: &[Row], stride: usize, queries: &[Row]) {
        assert!(keys.len() > (TILE_ROWS - 1) * stride && queries.len() == HEADS);
        // SAFETY: the tiles are configured, and those that are read are in the slices.
        unsafe {
            asm!(
                "tileloadd tmm4, [{keys} + {stride}]",
                "tileloadd tmm5, [{queries} + {row}]",
                "tdpbf16ps tmm0, tmm4, tmm5",
                "tileloadd tmm6, [{queries} + {row} + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm6",
                "tileloadd tmm7, [{queries} + {row} + 2048]",
                "tdpbf16ps tmm2, tmm4, tmm7",
                "tileloadd tmm5, [{queries} + {row} + 3072]",
                "tdpbf16ps tmm3, tmm4, tmm5",
                keys = in(reg) keys.as_ptr(),
                stride = in(reg) stride * size_of::<Row>(),
                queries = in(reg) queries.as_ptr(),
                row = in(reg) size_of::<Row>(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(readonly, nostack),
            );
        }
    }

    /// Overwrites four of every `stride` elements, 16 times, with the sums of a key.
    #[inline(always)]
    fn store(&self, sums: &mut [Sums], stride: usize) {
        assert!(sums.len() >= (TILE_ROWS - 1) * stride + HEAD_TILES);
        // SAFETY: the tiles are configured, and those that are written are in the slice.
        unsafe {
            asm!(
                "tilestored [{sums} + {stride}], tmm0",
                "tilestored [{sums} + {stride} + 64], tmm1",
                "tilestored [{sums} + {stride} + 128], tmm2",
                "tilestored [{sums} + {stride} + 192], tmm3",
                sums = in(reg) sums.as_mut_ptr(),
                stride = in(reg) stride * size_of::<Sums>(),
                options(nostack),
            );
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: nothing reads the tiles afterwards.
        unsafe { asm!("tilerelease", options(nomem, nostack)) };
    }
}

/// Computes the scores of a run, 16 keys at a time. While the products of some keys are computed,
/// the next are unpacked and the sums of the previous are weighed, in turns: products take many
/// cycles, and reading a tile right after it was stored would wait for the store.
///
/// # Safety
/// [`available`] must have returned true.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
unsafe fn score<F: Scaled>(keys: &PackedRun<'_>, queries: &Queries, scores: &mut [f32]) {
    let (tokens, rows) = (keys.tokens.clone(), Rows::new(keys));
    let width = rows.head_dim / TILE_CHANNELS;
    let weights = queries.weights.as_chunks::<TILE_ROWS>().0;
    let steps = queries.tiles.len() / HEADS;
    let keys_of_step = TILE_ROWS.div_ceil(steps);
    let mut unpacked = [[EMPTY; TILE_ROWS * WIDEST_TILES]; 2];
    let [mut next, mut current] = unpacked.each_mut();
    let mut sums = vec![Sums([0.0; TILE_ROWS]); 2 * TILE_ROWS * weights.len()];
    let (mut sums, mut previous) = sums.split_at_mut(TILE_ROWS * weights.len());
    let unpack = Unpack::new::<F>(&rows);
    // SAFETY: as the caller guarantees; nothing below calls this function.
    let tiles = unsafe { Tiles::new() };
    for block in 0..scores.len().div_ceil(TILE_ROWS) + 2 {
        let first = tokens.start + block * TILE_ROWS;
        rows.prefetch(first, TILE_ROWS);
        let mut totals = [_mm512_setzero_ps(); TILE_ROWS];
        let mut pending = 0..TILE_ROWS;
        let tiles_of_heads = queries.tiles.chunks_exact(queries.digits * width * HEADS);
        for (part, tiles_of_heads) in tiles_of_heads.enumerate() {
            tiles.clear();
            for tiles_of_digit in tiles_of_heads.chunks_exact(width * HEADS) {
                for (k, tiles_of_channels) in tiles_of_digit.chunks_exact(HEADS).enumerate() {
                    tiles.multiply(&current[k..], width, tiles_of_channels);
                    for key in pending.by_ref().take(keys_of_step) {
                        // Past the end older keys stay, whose scores are dropped.
                        if first + key < tokens.end {
                            unpack.key::<F>(&rows, first + key, &mut next[key * width..][..width]);
                        }
                        let of_key = &previous[key * weights.len()..][..weights.len()];
                        totals[key] = total(of_key, weights);
                    }
                }
            }
            tiles.store(&mut sums[part * HEAD_TILES..], weights.len());
        }
        if let Some(done) = block.checked_sub(2) {
            let scores = &mut scores[done * TILE_ROWS..];
            let wanted = scores.len().min(TILE_ROWS);
            store(&mut scores[..wanted], 0, sums_over_lanes(totals));
        }
        swap(&mut next, &mut current);
        swap(&mut sums, &mut previous);
    }
}

/// Returns the weighted sums over heads: lane `i` has the heads `i`, `i + 16` and so on.
#[inline]
#[target_feature(enable = "avx512f")]
fn total(sums: &[Sums], weights: &[[f32; TILE_ROWS]]) -> __m512 {
    let mut total = _mm512_setzero_ps();
    for (sums, weights) in sums.iter().zip(weights) {
        // SAFETY: both arrays have 16 floats.
        let (sums, weights) =
            unsafe { (_mm512_loadu_ps(sums.0.as_ptr()), _mm512_loadu_ps(weights.as_ptr())) };
        total = weighed(sums, weights, total);
    }
    total
}

/// Returns a vector of the sums over the lanes of each vector.
#[inline]
#[target_feature(enable = "avx512f")]
fn sums_over_lanes(x: [__m512; LANES]) -> __m512 {
    // Each step halves the lanes of a vector in the sums, and joins two vectors.
    let mut twos = [_mm512_setzero_ps(); LANES / 2];
    for i in 0..LANES / 2 {
        let (a, b) = (x[2 * i], x[2 * i + 1]);
        twos[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    let mut fours = [_mm512_setzero_ps(); LANES / 4];
    for i in 0..LANES / 4 {
        let (a, b) = (_mm512_castps_pd(twos[2 * i]), _mm512_castps_pd(twos[2 * i + 1]));
        let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    }
    let [a, b, c, d] = fours;
    let ab = _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b),
        _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b),
    );
    let cd = _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b01_00_01_00>(c, d),
        _mm512_shuffle_f32x4::<0b11_10_11_10>(c, d),
    );
    _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd),
        _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd),
    )
}

/// Tables that turn the codes of tokens into bf16.
struct Unpack {
    /// By 64 codes of E4M3, or 128 of E2M1: which byte of a token's exponents each lane of 16 bits
    /// takes.
    scales: [__m512i; WIDEST / 64],
    /// The low bytes of the numbers of 128 codes.
    low: [__m512i; 2],
    /// The high bytes.
    high: [__m512i; 2],
    /// The numbers of 32 codes; those of 4 bits repeat.
    few: __m512i,
}

impl Unpack {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn new<F: Scaled>(rows: &Rows<'_>) -> Self {
        let bf16 = |code| half::bf16::from_f32(F::value(code)).to_le_bytes();
        let (mut low, mut high, mut few) = ([0; 128], [0; 128], [0; 32]);
        for (code, (low, high)) in (0..).zip(low.iter_mut().zip(&mut high)) {
            [*low, *high] = bf16(code);
        }
        for (code, few) in (0..).zip(&mut few) {
            *few = u16::from_le_bytes(bf16(code % 16));
        }
        let group_size = rows.head_dim / rows.groups;
        let mut scales = [[0; TILE_CHANNELS]; WIDEST / 64];
        for (vector, lanes) in scales.iter_mut().enumerate() {
            for (lane, byte) in lanes.iter_mut().enumerate() {
                let channel = match F::FORMAT {
                    Codec::E4m3Blocks => vector * 64 + lane / 8 * 16,
                    _ => vector * 128 + lane * 4,
                };
                // The exponent goes to the upper byte, and the lower one is cleared.
                *byte = ((channel / group_size) as u16) << 8 | 0x80;
            }
        }
        let mut unpack = Self {
            scales: [_mm512_setzero_si512(); WIDEST / 64],
            low: [load(&low[..64]), load(&low[64..])],
            high: [load(&high[..64]), load(&high[64..])],
            few: load(bytemuck::cast_slice(&few)),
        };
        for (to, from) in unpack.scales.iter_mut().zip(&scales) {
            *to = load(bytemuck::cast_slice(from));
        }
        unpack
    }

    /// Returns the exponents of a token's scales as bytes, twice in each lane of 128 bits.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn exponents(&self, rows: &Rows<'_>, token: usize) -> __m512i {
        let bytes = &rows.parameters[token * rows.groups..];
        let scales = bytes.first_chunk().copied().unwrap_or_else(|| {
            let mut scales = [0; 8];
            scales[..bytes.len()].copy_from_slice(bytes);
            scales
        });
        let scales = _mm512_set1_epi64(i64::from_le_bytes(scales));
        let exponents = _mm512_sub_epi8(scales, _mm512_set1_epi8(127));
        _mm512_max_epi8(exponents, _mm512_set1_epi8(LOWEST))
    }

    /// Multiplies numbers in bf16 with the scales of the `nth` vector of codes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn scaled<const N: usize>(
        &self,
        mut numbers: [__m512i; N],
        exponents: __m512i,
        nth: usize,
    ) -> [__m512i; N] {
        let exponents = _mm512_shuffle_epi8(exponents, self.scales[nth]);
        // The exponents of bf16 begin at bit 7.
        let exponents = _mm512_srai_epi16::<1>(exponents);
        for numbers in &mut numbers {
            let nonzero = _mm512_test_epi16_mask(*numbers, _mm512_set1_epi16(i16::MAX));
            *numbers = _mm512_maskz_add_epi16(nonzero, *numbers, exponents);
        }
        numbers
    }

    /// Unpacks a token.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
    fn key<F: Scaled>(&self, rows: &Rows<'_>, token: usize, to: &mut [Row]) {
        match F::FORMAT {
            Codec::E4m3Blocks => self.e4m3(rows, token, to),
            _ => self.e2m1(rows, token, to),
        }
    }

    /// Unpacks a token of E4M3 codes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
    fn e4m3(&self, rows: &Rows<'_>, token: usize, to: &mut [Row]) {
        let exponents = self.exponents(rows, token);
        let codes = &rows.codes[token * rows.width..][..rows.width];
        let codes = codes.as_chunks::<64>().0;
        for (nth, (codes, to)) in codes.iter().zip(to.as_chunks_mut().0).enumerate() {
            let codes = load(codes);
            // The instruction reads the low seven bits of an index; the eighth is the sign.
            let low = _mm512_permutex2var_epi8(self.low[0], codes, self.low[1]);
            let high = _mm512_permutex2var_epi8(self.high[0], codes, self.high[1]);
            let high = _mm512_or_si512(high, _mm512_and_si512(codes, _mm512_set1_epi8(i8::MIN)));
            let numbers = [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)];
            keep(self.scaled(numbers, exponents, nth), to);
        }
    }

    /// Unpacks a token of E2M1 codes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
    fn e2m1(&self, rows: &Rows<'_>, token: usize, to: &mut [Row]) {
        let exponents = self.exponents(rows, token);
        let codes = &rows.codes[token * rows.width..][..rows.width];
        let codes = codes.as_chunks::<64>().0;
        for (nth, (codes, to)) in codes.iter().zip(to.as_chunks_mut().0).enumerate() {
            let codes = load(codes);
            // The instruction reads the low five bits of an index, and the table repeats.
            let numbers = [
                _mm512_permutexvar_epi16(codes, self.few),
                _mm512_permutexvar_epi16(_mm512_srli_epi16::<4>(codes), self.few),
                _mm512_permutexvar_epi16(_mm512_srli_epi16::<8>(codes), self.few),
                _mm512_permutexvar_epi16(_mm512_srli_epi16::<12>(codes), self.few),
            ];
            keep(self.scaled(numbers, exponents, nth), to);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8]) -> __m512i {
    let bytes: &[u8; 64] = bytes.try_into().expect("a vector has 64 bytes");
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn keep<const N: usize>(numbers: [__m512i; N], to: &mut [Row; N]) {
    for (numbers, to) in numbers.into_iter().zip(to) {
        // SAFETY: a row has 64 bytes.
        unsafe { _mm512_storeu_si512(to.0.as_mut_ptr().cast(), numbers) };
    }
}
