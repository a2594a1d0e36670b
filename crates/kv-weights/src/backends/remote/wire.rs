//! Structs of tensors as messages.

use burn::backend::{Backend, Remote, TensorMetadata, ir::BackendIr};
use kv_device::{
    remote::{Arg, Float, Incoming, Int, Malformed, Maybe, Outgoing, Wire},
    wire_struct,
};

use super::arguments::PartCount;
use crate::{FusedInputs, FusedPlan, MaybeFloat, PackedLayout, PartWords};

wire_struct!(inputs FusedTensors = FusedInputs {
    words: Parts,
    norm: OptionalFloat,
    bias: OptionalFloat,
    residual: OptionalFloat,
});

/// A [`MaybeFloat`].
pub(super) struct OptionalFloat;

impl Wire for OptionalFloat {
    type Value<B: Backend> = MaybeFloat<B>;

    fn send(value: MaybeFloat<Remote>, message: &mut Outgoing) {
        Maybe::<Float>::send(value.into_option(), message);
    }

    fn receive<B: BackendIr>(message: &mut Incoming<'_, B>) -> Result<MaybeFloat<B>, Malformed> {
        Ok(Maybe::<Float>::receive(message)?.into())
    }
}

/// [`PartWords`].
pub(super) struct Parts;

impl Wire for Parts {
    type Value<B: Backend> = PartWords<B>;

    fn send(value: PartWords<Remote>, message: &mut Outgoing) {
        let count = match &value {
            PartWords::One(..) => PartCount::One,
            PartWords::Two(..) => PartCount::Two,
            PartWords::Three(..) => PartCount::Three,
        };
        Arg::<PartCount>::send(count, message);
        for words in value.into_vec() {
            Int::send(words, message);
        }
    }

    fn receive<B: BackendIr>(message: &mut Incoming<'_, B>) -> Result<PartWords<B>, Malformed> {
        let count = Arg::<PartCount>::receive(message)?;
        let mut words = || Int::receive(message);
        Ok(match count {
            PartCount::One => PartWords::One(words()?),
            PartCount::Two => PartWords::Two(words()?, words()?),
            PartCount::Three => PartWords::Three(words()?, words()?, words()?),
        })
    }
}

/// Checks that a tensor holds all words of a matrix.
///
/// # Panics
/// If it holds fewer, which a server must not believe.
pub(super) fn words(matrix: &impl TensorMetadata, layout: &PackedLayout) {
    let (held, least) = (matrix.shape().num_elements(), layout.words());
    let [rows, columns] = layout.shape();
    assert!(
        held >= least,
        "{held} words do not hold a matrix [{rows}, {columns}] of {}, which has {least}",
        layout.format()
    );
}

/// Checks the tensors of a fused product.
///
/// # Panics
/// If they do not fit the plan.
pub(super) fn fused<B: Backend>(inputs: &FusedInputs<B>, plan: &FusedPlan) {
    let parts: Vec<_> = match &inputs.words {
        PartWords::One(a) => vec![a],
        PartWords::Two(a, b) => vec![a, b],
        PartWords::Three(a, b, c) => vec![a, b, c],
    };
    let (tensors, layouts) = (parts.len(), plan.parts.len());
    assert!(tensors == layouts, "{tensors} matrices, but the plan has {layouts}");
    parts.into_iter().zip(&plan.parts).for_each(|(part, layout)| words(part, layout));
}
