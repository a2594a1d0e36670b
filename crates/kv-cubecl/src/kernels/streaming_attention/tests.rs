use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

use super::{
    backward::{GradientInputsCompilationArg, keys_and_values::KeysAndValues, queries::Queries},
    forward::{ForwardBlueprint, forward_blocked::ForwardBlocked},
    kernel::{InputsCompilationArg, StreamBlueprint, forward::Forward},
};
use crate::kernels::{
    cuda_source::{buffer, each_ptx, named, settings},
    row_blocks::{Processor, RowBlocks, VECTOR},
};

fn inputs<Q: CubePrimitive, S: CubePrimitive>() -> InputsCompilationArg<Q, S> {
    InputsCompilationArg {
        query: buffer(),
        key: buffer(),
        key_hat: buffer(),
        value: buffer(),
        value_hat: buffer(),
    }
}

fn gradient_inputs() -> GradientInputsCompilationArg {
    GradientInputsCompilationArg {
        query: buffer(),
        keys: buffer(),
        values: buffer(),
        grad: buffer(),
        stats: buffer(),
        slices: (),
    }
}

/// The blocked forward pass with keys and values quantized, the simple one, and the backward pass.
#[test]
fn no_array_is_in_local_memory() {
    let (b, t) = (buffer, Default::default);
    // Scalars have no compilation arguments: the struct of them is of size zero.
    each_ptx(|card| {
        let d = || card.clone();
        let f32 = ElemType::Float(FloatKind::F32);
        let blocks = RowBlocks::new(128.into(), 0, 0, Processor::of(&card)).unwrap();
        let forward_blocked = ForwardBlocked::new(
            settings(blocks.units, ExecutionMode::Unchecked),
            d(),
            t(),
            inputs(),
            b(),
            b(),
            ().dynamic_cast(),
            VECTOR,
            ForwardBlueprint {
                blocks,
                flat: false,
                keys: true,
                values: true,
                window: false,
                softcap: false,
            },
            f32,
        );
        let s = || settings(128, ExecutionMode::Checked);
        let bp = |head_dim: usize| StreamBlueprint {
            head_dim: head_dim.into(),
            units: 128,
            flat: false,
            window: false,
            softcap: false,
        };
        let forward =
            Forward::new(s(), d(), t(), inputs(), b(), b(), ().dynamic_cast(), bp(126), f32);
        let args = || ().dynamic_cast();
        let queries = Queries::new(s(), d(), t(), gradient_inputs(), b(), args(), bp(128));
        let args = || ().dynamic_cast();
        let keys_and_values =
            KeysAndValues::new(s(), d(), t(), gradient_inputs(), b(), args(), bp(128));
        vec![
            named("forward-d128", forward_blocked),
            named("forward-d126", forward),
            named("backward-queries-d128", queries),
            named("backward-sides-d128", keys_and_values),
        ]
    });
}
