use cubecl::prelude::*;

use super::{
    kernel::{TokenBlueprint, append::Append, flush::Flush, write_token::WriteToken},
    launch::F32,
};
use crate::{
    Bits, Granularity,
    formats::cube::Affine,
    kernels::{
        ELEMENTWISE_UNITS,
        cuda_source::{buffer, each_ptx, named, settings},
    },
    layout::QuantSpec,
};

/// Two bits in groups of 32 and f32, as `k2v2`: the narrowest codes, the most of them per word.
#[test]
fn no_array_is_in_local_memory() {
    let s = || settings(ELEMENTWISE_UNITS, ExecutionMode::Checked);
    let (b, t) = (buffer, Default::default);
    let [keys, values] = [Granularity::PerChannel, Granularity::PerToken]
        .map(|granularity| QuantSpec::new(granularity, Bits::Two, 32).unwrap());
    // Scalars have no compilation arguments, and the structs of them are of size zero.
    each_ptx(|card| {
        let d = || card.clone();
        let token = TokenBlueprint { keys: Some(keys), values: Some(values), saturating: false };
        let position = ComptimeOptionCompilationArg::None;
        let args = || ().dynamic_cast();
        let write_token = {
            let args = ().dynamic_cast();
            WriteToken::<Affine, Affine>::new(
                s(),
                d(),
                t(),
                b(),
                b(),
                b(),
                b(),
                b(),
                position,
                ComptimeOptionCompilationArg::None,
                args,
                token,
                F32,
                F32,
            )
        };
        let flush = |spec| {
            let side = ().dynamic_cast();
            Flush::<Affine>::new(
                s(),
                d(),
                t(),
                b(),
                b(),
                b(),
                args(),
                side,
                (),
                (),
                (),
                (),
                spec,
                F32,
            )
        };
        let side = ().dynamic_cast();
        let append = Append::new(s(), d(), t(), b(), b(), args(), side, (), (), false, F32);
        vec![
            named("write-token-k2v2", write_token),
            named("flush-keys-k2", flush(keys)),
            named("flush-values-v2", flush(values)),
            named("append-float", append),
        ]
    });
}
