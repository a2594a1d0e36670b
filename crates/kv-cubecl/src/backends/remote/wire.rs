//! Structs of tensors as messages.

use burn::backend::{Backend, Remote, ir::BackendIr};
use kv_device::{
    remote::{Float, Incoming, Int, Malformed, Maybe, Outgoing, Output, TensorSpec, Wire},
    wire_struct,
};

use crate::{
    Side,
    delta::{DeltaStore, StepInputs, StepWeights},
    layout::CacheLayout,
    ops::{CacheState, Token, TokenPosition, TokenRope},
    sparse::{AttendInputs, PoolInputs, RowLayout, Rows},
};

wire_struct!(Cache = CacheState { keys: Int, values: Int, floats: Float });
wire_struct!(inputs DecodeToken = Token {
    query: Float,
    key: Float,
    value: Float,
    position: Position,
    rope: Rope,
});
wire_struct!(RowStore = Rows { codes: Int, floats: Float });
wire_struct!(inputs Pool = PoolInputs {
    content: Float,
    gate: Float,
    position_bias: Float,
    gain: Float,
    rope: Float,
});
wire_struct!(inputs Attend = AttendInputs {
    query: Float,
    window: RowStore,
    entries: RowStore,
    selected: Int,
    sink_logits: Float,
});
wire_struct!(Delta = DeltaStore { conv: Float, state: Float });
wire_struct!(inputs DeltaInputs = StepInputs { mixed: Float, rates: Float, position: Position });
wire_struct!(inputs DeltaWeights = StepWeights {
    conv: Float,
    log_rate: Float,
    time_bias: Float,
    gain: Float,
});

/// A [`TokenPosition`].
pub(crate) struct Position;

impl Wire for Position {
    type Value<B: Backend> = TokenPosition<B>;

    fn send(value: TokenPosition<Remote>, message: &mut Outgoing) {
        Maybe::<Int>::send(value.into_option(), message);
    }

    fn receive<B: BackendIr>(message: &mut Incoming<'_, B>) -> Result<TokenPosition<B>, Malformed> {
        let stored = Maybe::<Int>::receive(message)?;
        Ok(stored.map_or(TokenPosition::Counted, TokenPosition::Stored))
    }
}

/// A [`TokenRope`].
pub(crate) struct Rope;

impl Wire for Rope {
    type Value<B: Backend> = TokenRope<B>;

    fn send(value: TokenRope<Remote>, message: &mut Outgoing) {
        Maybe::<Float>::send(value.into_option(), message);
    }

    fn receive<B: BackendIr>(message: &mut Incoming<'_, B>) -> Result<TokenRope<B>, Malformed> {
        let table = Maybe::<Float>::receive(message)?;
        Ok(table.map_or(TokenRope::Absent, TokenRope::Table))
    }
}

/// Returns shapes and types of the tensors of a cache.
///
/// # Panics
/// If they are smaller than the layout says, which a server must not believe.
pub(super) fn cache<B: Backend>(state: &CacheState<B>, layout: &CacheLayout) -> Vec<TensorSpec> {
    let specs = Cache::specs::<B>(state);
    let floats: usize = layout.float_shape().iter().product();
    let needs = [layout.words(Side::Keys), layout.words(Side::Values), floats];
    fits(&specs, needs, layout.config());
    specs
}

/// Returns shapes and types of the tensors of a store of rows.
///
/// # Panics
/// As [`cache`] does.
pub(super) fn rows<B: Backend>(store: &Rows<B>, layout: &RowLayout) -> Vec<TensorSpec> {
    let specs = RowStore::specs::<B>(store);
    let floats: usize = layout.float_shape().iter().product();
    fits(&specs, [layout.words(), floats], layout.format.codes);
    specs
}

/// Returns shapes and types of the tensors of a state of the delta rule.
pub(super) fn delta<B: Backend>(store: &DeltaStore<B>) -> Vec<TensorSpec> {
    Delta::specs::<B>(store)
}

fn fits<const N: usize>(specs: &[TensorSpec], needs: [usize; N], what: impl core::fmt::Display) {
    for (spec, least) in specs.iter().zip(needs) {
        let elements = spec.shape.num_elements();
        assert!(elements >= least, "a tensor of {elements} elements does not fit {what}: {least}");
    }
}
