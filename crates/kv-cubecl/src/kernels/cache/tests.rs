use cubecl::prelude::*;

use super::{
    kernel::{
        TokenBlueprint, append::Append, flush_keys::FlushKeys, flush_values::FlushValues,
        write_token::WriteToken,
    },
    launch::F32,
};
use crate::kernels::{
    ELEMENTWISE_UNITS,
    cuda_source::{buffer, each_ptx, named, settings},
};

/// Two bits in groups of 32 and f32, as `k2v2`: the narrowest codes, the most of them per word.
#[test]
fn no_array_is_in_local_memory() {
    let s = || settings(ELEMENTWISE_UNITS, ExecutionMode::Checked);
    let (b, t) = (buffer, Default::default);
    // Scalars have no compilation arguments, and the structs of them are of size zero.
    each_ptx(|card| {
        let d = || card.clone();
        let token =
            TokenBlueprint { group_size: 32, key_bits: 2, value_bits: 2, saturating: false };
        let position = ComptimeOptionCompilationArg::None;
        let (args, source) = (().dynamic_cast(), || ().dynamic_cast());
        let write_token =
            WriteToken::new(s(), d(), t(), b(), b(), b(), b(), b(), position, args, token, F32);
        let flush_keys =
            FlushKeys::new(s(), d(), t(), b(), b(), b(), source(), (), (), (), (), 32, 2, F32);
        let flush_values =
            FlushValues::new(s(), d(), t(), b(), b(), b(), source(), (), (), (), (), 32, 2, F32);
        let append = Append::new(s(), d(), t(), b(), b(), source(), (), (), false, F32);
        vec![
            named("write-token-k2v2", write_token),
            named("flush-keys-k2", flush_keys),
            named("flush-values-v2", flush_values),
            named("append-float", append),
        ]
    });
}
