//! The operations on remote devices: clients send them to a server, which runs them.

use burn::backend::Backend;
use kv_device::{
    remote::{Arg, Argument, Float, Int, Output, TensorSpec},
    wire_struct,
};

use crate::{CursorState, Draw, SamplingOps};

wire_struct!(State = CursorState { ids: Int, position: Int, broken: Int });

impl Argument for Draw {
    fn check(&self) -> Result<(), String> {
        self.validate().map_err(|error| error.to_string())
    }
}

kv_device::remote_ops! {
    "kv_sampling", SamplingOps, serve_sampling;

    fn advance(
        logits: Float,
        state: State,
        ends: Int,
        past: Arg<usize>,
        draw: Arg<Draw>,
    ) -> State {
        specs(&state)
    }
}

fn specs<B: Backend>(state: &CursorState<B>) -> Vec<TensorSpec> {
    State::specs::<B>(state)
}
