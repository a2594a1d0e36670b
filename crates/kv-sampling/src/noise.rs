//! Random numbers without a state, which are the same on every device.

/// Hashes `x` by lowbias32 of <https://github.com/skeeto/hash-prospector>.
pub(crate) const fn mix(x: u32) -> u32 {
    let x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    let x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// Returns the two numbers from which the [`uniform`] numbers of a sequence at a position are made.
pub(crate) const fn keys(seed: u64, sequence: u32, position: u32) -> [u32; 2] {
    let first = mix(mix(mix(seed as u32) ^ position).wrapping_add(sequence));
    let second = mix(mix(mix((seed >> 32) as u32 ^ 0x9e37_79b9) ^ sequence).wrapping_add(position));
    [first, second]
}

/// Returns the random number of a token id, for the draw of a sequence of the batch at a position.
/// It is above 0 and below 1, one of 2^23 equally likely numbers.
pub const fn uniform(seed: u64, sequence: u32, position: u32, id: u32) -> f32 {
    let [first, second] = keys(seed, sequence, position);
    let bits = mix(mix(id ^ first).wrapping_add(second));
    ((bits >> 9) as f32 + 0.5) / (1 << 23) as f32
}
