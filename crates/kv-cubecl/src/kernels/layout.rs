//! The kernels' copy of [`layout`](crate::layout): where tokens are, and which are quantized when. The
//! conformance suite holds it to the original.

use cubecl::prelude::*;

use crate::{
    formats::PackedFormat,
    layout::{CacheLayout, Schedule, SideLayout, SideSchedule, Sides},
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
    pub(crate) window: usize,
    pub(crate) keys: SideScheduleArgs,
    pub(crate) values: SideScheduleArgs,
}

impl Schedule {
    pub(crate) fn args(&self) -> ScheduleArgsLaunch {
        let [keys, values] = self.sides.map(|side| side.args()).into_array();
        // Without a window all tokens are recent; kernels add the sinks to it in u32.
        let window = self.window.unwrap_or(1 << 31);
        ScheduleArgsLaunch::new(self.sink_tokens, self.lag(), window, keys, values)
    }
}

/// How many tokens of a side, one of those of `schedule`, are quantized in a cache of `len` tokens:
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
    if len > schedule.sinks + schedule.window {
        begin = len - schedule.window;
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
    /// Packed tokens that there is room for.
    packed_tokens: usize,
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

/// The first element of the float row of `token` among those of both sides: [`SideLayout::element`].
#[cube]
pub(crate) fn float_element(token: usize, side: &SideArgs) -> usize {
    let mut row = token;
    if token >= side.sinks {
        row = side.sinks + (token - side.sinks) % side.ring;
    }
    side.first_element + row * side.head_dim
}

/// Where the `token`th token after the sinks is among the packed ones: [`SideLayout::packed_slot`].
#[cube]
pub(crate) fn packed_slot(token: usize, side: &SideArgs) -> usize {
    token % side.packed_tokens
}

/// What kernels are told of a cache.
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
    /// Bits of a code of the keys, and of the values: 0 where they stay in float.
    pub(crate) fn code_bits(&self) -> [u32; 2] {
        self.sides().map(|side| side.spec.map_or(0, |spec| spec.n_bits)).into_array()
    }

    /// The formats of packed keys and values; any where a side stays in float, since nothing is read then.
    pub(crate) fn formats(&self) -> Sides<PackedFormat> {
        let format = |side: SideLayout| side.spec.map_or(PackedFormat::Affine, |spec| spec.format);
        self.sides().map(format)
    }

    pub(crate) fn args(&self) -> CacheArgsLaunch {
        let [keys, values] = self.sides().map(|side| side.args()).into_array();
        let (elements, capacity) = (self.float_elements(), self.config().capacity);
        CacheArgsLaunch::new(self.schedule().args(), keys, values, elements, capacity)
    }
}
