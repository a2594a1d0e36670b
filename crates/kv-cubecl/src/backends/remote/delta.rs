//! The table of [`DeltaOps`].

use kv_device::remote::{Arg, Float, spec as tensor};

use super::wire::{Delta, DeltaInputs, DeltaWeights, delta};
use crate::{
    delta::{DeltaConfig, DeltaOps},
    shapes::fusion as shapes,
};

kv_device::remote_ops! {
    "kv_cubecl", DeltaOps, serve_delta;

    fn delta_step(
        store: Delta,
        inputs: DeltaInputs,
        weights: DeltaWeights,
        config: Arg<DeltaConfig>,
        epsilon: Arg<f64>,
    ) -> (Delta, Float) {
        (delta(&store), shapes::delta_output(&tensor(&inputs.mixed), &config))
    }
}
