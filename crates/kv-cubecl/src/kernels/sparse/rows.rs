//! Reads rows of a store, and the tokens of a call.

use cubecl::prelude::*;

use crate::{
    formats::{
        QuantSpec,
        cube::{code_in, high_bits, low_word, offset, restore, scale},
    },
    kernels::layout::{parameter_address, parameter_in},
    sparse::RowLayout,
};

/// A [`RowLayout`] but for its formats, which decide the code that is generated.
#[derive(CubeType, CubeLaunch)]
pub(super) struct RowArgs {
    pub(super) slots: usize,
    pub(super) width: usize,
    /// Channels without codes.
    pub(super) floats: usize,
    /// Code words of a sequence.
    pub(super) sequence_words: usize,
}

impl RowLayout {
    pub(super) fn args(&self) -> RowArgsLaunch {
        RowArgsLaunch::new(self.slots, self.width, self.floats(), self.sequence_words())
    }

    /// Returns the quantization of the channels with codes, if any.
    pub(super) fn code_spec(&self) -> Option<QuantSpec> {
        self.format.spec(self.width)
    }

    /// Returns the number of elements of the longer tensor.
    pub(super) fn elements(&self) -> usize {
        self.words().max(self.float_shape().into_iter().product())
    }
}

/// Reads a channel of the row in a slot.
#[cube]
pub(super) fn channel_at<R: Float>(
    codes: &[u32],
    floats: &[R],
    sequence: usize,
    slot: usize,
    channel: usize,
    args: &RowArgs,
    #[comptime] spec: Option<QuantSpec>,
) -> f32 {
    #[comptime]
    match spec {
        Some(spec) => {
            let coded = args.width - args.floats;
            if channel < coded {
                code_at(codes, sequence, slot, channel, coded, args, spec)
            } else {
                let row = (sequence * args.slots + slot) * args.floats;
                f32::cast_from(floats[row + channel - coded])
            }
        }
        None => f32::cast_from(floats[(sequence * args.slots + slot) * args.width + channel]),
    }
}

/// Restores a channel with a code.
#[cube]
fn code_at(
    codes: &[u32],
    sequence: usize,
    slot: usize,
    channel: usize,
    coded: usize,
    args: &RowArgs,
    #[comptime] spec: QuantSpec,
) -> f32 {
    let group_size = comptime!(spec.group_size);
    let code_words = comptime!(spec.code_words());
    let codes_per_word = comptime!(spec.codes_per_word());
    let first = sequence * args.sequence_words;
    let groups = coded / group_size;
    let group = channel / group_size;
    let at = channel % group_size;
    let mut base = first + slot * groups * code_words;
    let parameter = if comptime!(spec.packs_parameters()) {
        let place = parameter_address(slot, group, args.slots, coded, spec);
        parameter_in(codes[first + place.word], place.shift, spec)
    } else {
        base = first + slot * groups * (code_words + 1);
        codes[base + groups * code_words + group]
    };
    let word = base + group * code_words;
    let run = at / codes_per_word;
    let low = codes[word + low_word(run, spec)];
    let high = high_bits(codes, word, 1usize, run, spec);
    let code = code_in(low, high, at % codes_per_word, spec);
    restore(code, scale(parameter, spec), offset(parameter, spec), spec)
}

/// The tokens of a call in one sequence.
#[derive(CubeType)]
pub(super) struct Added {
    /// Tokens before the call.
    pub(super) start: usize,
    /// Tokens of the call; 0 if the sequence takes no part.
    pub(super) count: usize,
}

/// Returns the tokens of a call in a sequence, from `span`, `[2, batch]`.
#[cube]
pub(super) fn added(span: &[i32], sequence: usize, batch: usize) -> Added {
    let mut start = 0usize;
    let mut count = 0usize;
    if span[sequence] >= 0 && span[batch + sequence] > 0 {
        start = span[sequence] as usize;
        count = span[batch + sequence] as usize;
    }
    Added { start, count }
}
