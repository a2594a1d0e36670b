//! The operations on remote devices: clients send them to a server, which runs them.

mod arguments;
mod wire;

use kv_device::remote::{Arg, Float, Int, spec as tensor};

use self::wire::{FusedTensors, words};
use crate::{
    Activations, ExpertSelection, FusedPlan, Gate, PackedLayout, WeightOps,
    shapes::{self, floats},
};

kv_device::remote_ops! {
    "kv_weights", WeightOps, serve_weights;

    fn packed_project(
        x: Float,
        matrix: Int,
        layout: Arg<PackedLayout>,
        activations: Arg<Activations>,
    ) -> Float {
        {
            words(&matrix, &layout);
            shapes::project(&tensor(&x), &layout)
        }
    }

    fn packed_fused(x: Float, inputs: FusedTensors, plan: Arg<FusedPlan>) -> Float {
        {
            wire::fused(&inputs, &plan);
            shapes::fused(&tensor(&x), &plan)
        }
    }

    fn packed_picked(
        x: Float,
        experts: Int,
        picked: Int,
        layout: Arg<PackedLayout>,
        picks: Arg<ExpertSelection>,
    ) -> Float {
        {
            words(&experts, &layout);
            shapes::picked(&tensor(&picked), &layout)
        }
    }

    fn packed_gate(x: Float, gate: Arg<Gate>) -> Float {
        shapes::gate(&tensor(&x))
    }

    fn packed_project_backward(grad: Float, matrix: Int, layout: Arg<PackedLayout>) -> Float {
        {
            words(&matrix, &layout);
            shapes::project_backward(&tensor(&grad), &layout)
        }
    }

    fn packed_rows(matrix: Int, ids: Int, layout: Arg<PackedLayout>) -> Float {
        {
            words(&matrix, &layout);
            shapes::rows(&tensor(&ids), &layout)
        }
    }

    fn packed_restore(
        matrix: Int,
        layout: Arg<PackedLayout>,
        start: Arg<usize>,
        n: Arg<usize>,
    ) -> Float {
        {
            words(&matrix, &layout);
            floats([n, layout.columns()])
        }
    }
}
