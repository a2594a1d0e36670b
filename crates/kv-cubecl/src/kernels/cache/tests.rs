use cubecl::prelude::*;

use super::{
    kernel::{TokenBlueprint, append::Append, flush::Flush, write_token::WriteToken},
    launch::F32,
};
use crate::{
    CacheShape,
    kernels::{
        ELEMENTWISE_UNITS,
        cuda_source::{buffer, each_ptx, named, settings},
    },
    layout::{CacheLayout, Sides},
};

/// Two bits in groups of 32, the narrowest codes and the most of them per word, and formats that
/// quantize tokens by themselves, whose parameters share words.
const CACHES: [&str; 4] = ["k2v2", "kint8vint8", "ke4m3ve5m2", "kmxfp4ve4m3b"];

#[test]
fn no_array_is_in_local_memory() {
    let s = || settings(ELEMENTWISE_UNITS, ExecutionMode::Checked);
    let (b, t) = (buffer, Default::default);
    // Scalars have no compilation arguments, and the structs of them are of size zero.
    each_ptx(|card| {
        let d = || card.clone();
        let args = || ().dynamic_cast();
        let mut kernels = Vec::new();
        for cache in CACHES {
            let shape = CacheShape::new(1, 8, 128);
            let layout = CacheLayout::new(&cache.parse().unwrap(), shape).unwrap();
            let Sides { keys, values } = layout.sides().map(|side| side.spec);
            let write_token = {
                let args = ().dynamic_cast();
                let (position, table) =
                    (ComptimeOptionCompilationArg::None, ComptimeOptionCompilationArg::None);
                let bp = TokenBlueprint { keys, values, saturating: false };
                WriteToken::new(
                    s(),
                    d(),
                    t(),
                    b(),
                    b(),
                    b(),
                    b(),
                    b(),
                    position,
                    table,
                    args,
                    bp,
                    F32,
                    F32,
                )
            };
            kernels.push(named(format!("write-token-{cache}"), write_token));
            for (side, spec) in [("keys", keys), ("values", values)] {
                let sides = ().dynamic_cast();
                let runs = ().dynamic_cast();
                let spec = spec.unwrap();
                let flush = Flush::new(
                    s(),
                    d(),
                    t(),
                    b(),
                    b(),
                    b(),
                    args(),
                    sides,
                    (),
                    runs,
                    spec,
                    false,
                    F32,
                );
                kernels.push(named(format!("flush-{side}-{cache}"), flush));
            }
        }
        let side = ().dynamic_cast();
        let append = Append::new(s(), d(), t(), b(), b(), args(), side, (), (), false, F32);
        kernels.push(named("append-float", append));
        kernels
    });
}
