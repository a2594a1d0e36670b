//! The kernels as CUDA C++, for the shapes of DeepSeek-V4.

use cubecl::prelude::*;

use super::{
    attend::{
        args::{AttendBlueprint, InputsCompilationArg},
        kernel::attend_rows::AttendRows,
        merge::merge_parts::MergeParts,
    },
    pool::{self, pool_windows::PoolWindows},
    score::{self, score_keys::ScoreKeys},
    select::{self, select_scores::SelectScores},
};
use crate::{
    CacheFloat, KvFormat,
    kernels::{
        cuda_source::{buffer, cuda_source, dynamic_indices, h200, settings},
        head_rows::UNITS,
    },
    sparse::{RowFormat, RowLayout},
};

/// Names, entries and keys.
const FORMATS: [(&str, RowFormat, RowFormat); 3] = [
    ("f32", RowFormat::float(CacheFloat::F32), RowFormat::float(CacheFloat::F32)),
    (
        "e4m3b64-e4m3b",
        RowFormat::codes(KvFormat::E4m3Blocks64).with_float_channels(64, CacheFloat::Bf16),
        RowFormat::codes(KvFormat::E4m3Blocks),
    ),
    (
        "k4-e2m1b",
        RowFormat::codes(KvFormat::Affine4).with_float_channels(64, CacheFloat::Bf16),
        RowFormat::codes(KvFormat::E2m1Blocks),
    ),
];

#[test]
fn arrays_can_live_in_registers() {
    let (b, t) = (buffer, Default::default);
    let s = |units| settings(units, ExecutionMode::Checked);
    let mut kernels: Vec<(String, Box<dyn CubeKernel>)> = vec![];
    for (name, entries, keys) in FORMATS {
        let layout = |width, format| RowLayout { batch: 1, slots: 1024, width, format };
        let (entries, keys) = (layout(512, entries), layout(128, keys));
        for (partial, selects) in [(false, false), (true, true)] {
            let inputs = InputsCompilationArg {
                query: b(),
                window: b(),
                codes: b(),
                floats: b(),
                selected: b(),
                sink_logits: b(),
                span: b(),
            };
            let spec = entries.code_spec();
            let bp = AttendBlueprint { width: 512, compresses: true, selects, partial, spec };
            let float = entries.format.float.elem();
            let args = ().dynamic_cast();
            let kernel =
                AttendRows::new(s(UNITS), h200(), t(), inputs, b(), args, bp, float, float);
            let kind = if selects { "selected" } else { "all" };
            kernels.push((format!("sparse-{kind}-{name}"), Box::new(kernel)));
        }
        for own_heads in [1, 8] {
            let (args, float) = (().dynamic_cast(), keys.format.float.elem());
            let spec = keys.code_spec();
            let kernel = ScoreKeys::new(
                s(score::UNITS),
                h200(),
                t(),
                b(),
                b(),
                b(),
                b(),
                b(),
                args,
                own_heads,
                spec,
                float,
            );
            kernels.push((format!("index-{name}-heads{own_heads}"), Box::new(kernel)));
        }
    }
    let args = ().dynamic_cast();
    let merge = MergeParts::new(s(UNITS), h200(), t(), b(), b(), b(), args);
    kernels.push(("sparse-merge".into(), Box::new(merge)));
    let args = ().dynamic_cast();
    let select = SelectScores::new(s(select::UNITS), h200(), t(), b(), b(), b(), args);
    kernels.push(("select".into(), Box::new(select)));
    for overlap in [false, true] {
        let args = ().dynamic_cast();
        let pool = PoolWindows::new(
            s(pool::UNITS),
            h200(),
            t(),
            b(),
            b(),
            b(),
            b(),
            b(),
            b(),
            b(),
            args,
            512,
            overlap,
        );
        kernels.push((format!("pool-overlap-{overlap}"), Box::new(pool)));
    }
    for (name, kernel) in kernels {
        let source = cuda_source(&name, &*kernel);
        let dynamic = dynamic_indices(&source);
        assert!(dynamic.is_empty(), "{name}: {dynamic:#?}");
    }
}
