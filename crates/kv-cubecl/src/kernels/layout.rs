//! The kernels' copy of [`layout`](crate::layout): where tokens are, and which are quantized when.
//! The conformance suite holds it to the original.

use cubecl::prelude::*;
use kv_device::half::half_value;

use crate::layout::{
    CacheLayout, Granularity, QuantSpec, Schedule, SideLayout, SideSchedule, Sides,
};

/// A [`SideSchedule`].
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SideScheduleArgs {
    step: usize,
    keep: usize,
}

impl SideSchedule {
    fn args(&self) -> SideScheduleArgsLaunch {
        SideScheduleArgsLaunch::new(self.step, self.keep)
    }
}

/// A [`Schedule`].
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ScheduleArgs {
    pub(crate) sinks: usize,
    lag: usize,
    /// Recent tokens that a query sees.
    pub(crate) sliding_window: usize,
    pub(crate) keys: SideScheduleArgs,
    pub(crate) values: SideScheduleArgs,
}

impl Schedule {
    pub(crate) fn args(&self) -> ScheduleArgsLaunch {
        let [keys, values] = self.sides.map(|side| side.args()).into_array();
        // Without a sliding window every token is visible. Kernels add the sinks to this in u32.
        let sliding_window = self.sliding_window.unwrap_or(1 << 31);
        ScheduleArgsLaunch::new(self.sink_tokens, self.lag(), sliding_window, keys, values)
    }
}

/// Returns the number of quantized tokens of a side in a cache of `len` tokens:
/// [`Schedule::counts`].
#[cube]
pub(crate) fn quantized(len: usize, side: &SideScheduleArgs, schedule: &ScheduleArgs) -> usize {
    let unseen = schedule.sinks + schedule.lag + side.keep;
    let mut count = 0usize;
    if len > unseen {
        count = (len - unseen) / side.step * side.step;
    }
    count
}

/// The first token past the sinks that the query of token `len - 1` sees: [`Schedule::begin`].
#[cube]
pub(crate) fn begin(len: usize, schedule: &ScheduleArgs) -> usize {
    let mut begin = schedule.sinks;
    if len > schedule.sinks + schedule.sliding_window {
        begin = len - schedule.sliding_window;
    }
    begin
}

/// A [`SideLayout`] but for its formats, which decide the code that is generated.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SideArgs {
    pub(crate) sinks: usize,
    pub(crate) ring: usize,
    pub(crate) first_element: usize,
    pub(crate) head_dim: usize,
    /// Packed words of one slice.
    pub(crate) slice_words: usize,
    /// Capacity in packed tokens.
    pub(crate) packed_tokens: usize,
}

/// The place of a parameter that shares its word with others.
#[derive(CubeType)]
pub(crate) struct ParameterAddress {
    /// The word, counted from the first of its slice.
    pub(crate) word: usize,
    /// The lowest bit in it.
    pub(crate) shift: u32,
}

/// Returns the position of a group's parameter for the token in a slot, where parameters share
/// words: [`PackedLayout::parameter`](crate::layout::PackedLayout::parameter).
#[cube]
pub(crate) fn parameter_address(
    slot: usize,
    group: usize,
    tokens: usize,
    head_dim: usize,
    #[comptime] spec: QuantSpec,
) -> ParameterAddress {
    let per_word = comptime!(32 / spec.format.parameter_bits());
    let bits = comptime!(spec.format.parameter_bits() as u32);
    let nth = slot * (head_dim / spec.group_size) + group;
    let first = tokens * (head_dim * comptime!(spec.n_bits as usize) / 32);
    ParameterAddress { word: first + nth / per_word, shift: (nth % per_word) as u32 * bits }
}

/// A parameter that shares its word.
#[cube]
pub(crate) fn parameter_in(word: u32, shift: u32, #[comptime] spec: QuantSpec) -> u32 {
    let mask = comptime!(((1u64 << spec.format.parameter_bits()) - 1) as u32);
    (word >> shift) & mask
}

/// Returns the number of words of the groups of a block: [`QuantSpec::block_words`] without the
/// factors of a tile.
#[cube]
pub(crate) fn group_words(head_dim: usize, #[comptime] spec: QuantSpec) -> usize {
    let words_of_group = comptime!(spec.words_per_group());
    if comptime!(spec.granularity == Granularity::PerChannel) {
        head_dim * words_of_group
    } else {
        comptime!(spec.block_tokens()) * (head_dim / spec.group_size) * words_of_group
    }
}

/// Returns the number of words of a block: [`QuantSpec::block_words`].
#[cube]
pub(crate) fn block_words(head_dim: usize, #[comptime] spec: QuantSpec) -> usize {
    let groups = group_words(head_dim, spec);
    let tile = comptime!(spec.tile);
    #[comptime]
    match tile {
        Some(tile) => {
            if comptime!(spec.granularity == Granularity::PerChannel) {
                groups + comptime!(tile.tokens / 2)
            } else {
                groups + head_dim / 2
            }
        }
        None => groups,
    }
}

/// Returns factor `index` of a tile from its word.
#[cube]
pub(crate) fn factor_in(word: u32, index: usize) -> f32 {
    half_value((word >> ((index % 2) as u32 * 16u32)) & 0xffffu32)
}

impl SideLayout {
    pub(crate) fn args(&self) -> SideArgsLaunch {
        // A ring without slots is never read, but its length divides.
        let (ring, packed_tokens) = (self.ring.max(1), self.packed_tokens.max(1));
        let Self { sinks, first_element, head_dim, .. } = *self;
        let words = self.slice_words();
        SideArgsLaunch::new(sinks, ring, first_element, head_dim, words, packed_tokens)
    }
}

/// The first element of the float row of `token` among those of both sides:
/// [`SideLayout::element`].
#[cube]
pub(crate) fn float_element(token: usize, side: &SideArgs) -> usize {
    let mut row = token;
    if token >= side.sinks {
        row = side.sinks + (token - side.sinks) % side.ring;
    }
    side.first_element + row * side.head_dim
}

/// Returns the packed slot of the `token`th token after the sinks: [`SideLayout::packed_slot`].
#[cube]
pub(crate) fn packed_slot(token: usize, side: &SideArgs) -> usize {
    token % side.packed_tokens
}

/// The position of the newest token of each sequence, where kernels read it from a buffer.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Positions {
    /// One position, or one for each sequence; below 0 for a sequence that takes no part.
    pub(crate) newest: ComptimeOption<Box<[i32]>>,
    /// Slices that share a position.
    pub(crate) slices: usize,
}

/// Returns the position of the newest token of a slice's sequence, or 0 for one that takes no part;
/// `counted` where there is no buffer.
#[cube]
pub(crate) fn newest_position(slice: usize, positions: &Positions, counted: usize) -> usize {
    let mut position = counted;
    #[comptime]
    match &positions.newest {
        ComptimeOption::Some(newest) => {
            position = clamp_min(newest[slice / positions.slices], 0) as usize;
        }
        ComptimeOption::None => {}
    }
    position
}

/// Returns the launch argument of positions and their number, or of none.
pub(crate) fn positions_arg(
    positions: Option<(BufferArg, usize)>,
    layout: &CacheLayout,
) -> PositionsLaunch {
    let (newest, n) = positions.unzip();
    PositionsLaunch::new(newest.into(), layout.slices() / n.unwrap_or(1))
}

/// Run-time arguments that describe a cache.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct CacheArgs {
    pub(crate) schedule: ScheduleArgs,
    pub(crate) keys: SideArgs,
    pub(crate) values: SideArgs,
    /// Elements of the float rows of one slice, those of both sides.
    pub(crate) float_elements: usize,
    pub(crate) capacity: usize,
}

impl CacheLayout {
    /// Returns the quantization of keys and values, if any.
    pub(crate) fn specs(&self) -> Sides<Option<QuantSpec>> {
        self.sides().map(|side| side.spec)
    }

    pub(crate) fn args(&self) -> CacheArgsLaunch {
        let [keys, values] = self.sides().map(|side| side.args()).into_array();
        let (elements, capacity) = (self.float_elements(), self.config().capacity);
        CacheArgsLaunch::new(self.schedule().args(), keys, values, elements, capacity)
    }
}
