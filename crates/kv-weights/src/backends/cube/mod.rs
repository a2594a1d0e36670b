//! WGPU and CUDA: Burn's CubeCL tensors bound to the kernels.

use burn::{
    backend::{
        ops::{FloatTensorOps, IntTensorOps},
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, IntDType, Shape, Slice},
};
use burn_cubecl::{
    CubeBackend, cubecl::prelude::BufferArg, kernel::into_contiguous,
    ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor,
};

use super::composed;
use crate::{
    Activations, ExpertSelection, FusedInputs, FusedPlan, MaybeFloat, PackedLayout, Result,
    WeightOps,
    formats::with_kernels,
    kernels::{
        product::{self, Hardware, ProductBindings, ProductProblem, Way},
        restore, tiled,
    },
};

/// Maximum number of weights restored at once: 16 MiB.
const RESTORED: usize = 1 << 22;

impl WeightOps for CubeBackend {
    fn packed_project(
        x: FloatTensor<Self>,
        words: IntTensor<Self>,
        layout: PackedLayout,
        _: Activations,
    ) -> FloatTensor<Self> {
        let hardware = Hardware::of(x.client.properties());
        match hardware.way(rows_of(&x), layout.format()) {
            Way::Few => few(hardware, x, vec![words], [None, None, None], &plan_of(layout)),
            Way::Tiles => tiled(x, &words, layout),
            Way::Restored => many(x, &words, layout),
        }
    }

    fn packed_fused(
        x: FloatTensor<Self>,
        inputs: FusedInputs<Self>,
        plan: FusedPlan,
    ) -> FloatTensor<Self> {
        let hardware = Hardware::of(x.client.properties());
        if hardware.way(rows_of(&x), plan.parts[0].format()) != Way::Few {
            let (project, gate) = (Self::packed_project, Self::packed_gate);
            return composed::fused::<Self>(x, inputs, &plan, project, gate);
        }
        let FusedInputs { words, norm, bias, residual } = inputs;
        let extras = [norm, bias, residual].map(MaybeFloat::into_option);
        few(hardware, x, words.into_vec(), extras, &plan)
    }

    fn packed_picked(
        x: FloatTensor<Self>,
        words: IntTensor<Self>,
        picked: IntTensor<Self>,
        layout: PackedLayout,
        picks: ExpertSelection,
    ) -> FloatTensor<Self> {
        let (x, words, picked) =
            (into_contiguous(x), into_contiguous(words), into_contiguous(picked));
        let n = picked.meta.shape().num_elements();
        let out = empty_like(&x, [n, layout.rows()]);
        let hardware = Hardware::of(x.client.properties());
        let bytes = size_of::<u32>() * words.meta.shape().num_elements();
        let bindings = [&x, &words, &picked, &out].map(arg);
        launched(with_kernels!(layout.format(), F => {
            product::launch_picked::<F>(&x.client, bindings, layout, picks, [n, bytes], hardware)
        }));
        out
    }

    fn packed_project_backward(
        grad: FloatTensor<Self>,
        words: IntTensor<Self>,
        layout: PackedLayout,
    ) -> FloatTensor<Self> {
        let words = into_contiguous(words);
        let parts = parts(&layout).map(|[start, end]| {
            let grad = columns(grad.clone(), start, end);
            Self::float_matmul(grad, restored(&words, &layout, [start, end - start]))
        });
        let [n, _] = grad.meta.shape().dims();
        parts.reduce(Self::float_add).unwrap_or_else(|| empty_like(&grad, [n, layout.columns()]))
    }

    fn packed_rows(
        words: IntTensor<Self>,
        ids: IntTensor<Self>,
        layout: PackedLayout,
    ) -> FloatTensor<Self> {
        let words = into_contiguous(words);
        let ids = into_contiguous(Self::int_cast(ids, IntDType::I32));
        let n = ids.meta.shape().num_elements();
        let out = empty_like(&words, [n, layout.columns()]);
        launched(with_kernels!(layout.format(), F => {
            let ids = Some(arg(&ids));
            restore::launch::<F>(&words.client, arg(&words), ids, arg(&out), &layout, [0, n])
        }));
        out
    }

    fn packed_restore(
        words: IntTensor<Self>,
        layout: PackedLayout,
        start: usize,
        n: usize,
    ) -> FloatTensor<Self> {
        restored(&into_contiguous(words), &layout, [start, n])
    }
}

/// Returns the plan of a product with nothing fused.
fn plan_of(layout: PackedLayout) -> FusedPlan {
    FusedPlan {
        parts: vec![layout],
        activations: Activations::Exact,
        gate: None,
        epsilon: 0.0,
        plus_one: false,
    }
}

fn rows_of(x: &CubeTensor) -> usize {
    let [n, _] = x.meta.shape().dims();
    n
}

/// Multiplies few rows of `x` in one launch. `extras` are gains of the norm, bias and residual.
fn few(
    hardware: Hardware,
    x: CubeTensor,
    words: Vec<CubeTensor>,
    extras: [Option<CubeTensor>; 3],
    plan: &FusedPlan,
) -> CubeTensor {
    let [n, _] = x.meta.shape().dims();
    let x = into_contiguous(x);
    let out = empty_like(&x, [n, plan.outputs()]);
    // Only contiguous tensors are bound, and they live until the launch.
    let words: Vec<_> = words.into_iter().map(into_contiguous).collect();
    let [norm, bias, residual] = extras.map(|tensor| tensor.map(into_contiguous));
    let bindings = ProductBindings {
        x: arg(&x),
        words: words.iter().map(arg).collect(),
        norm: norm.as_ref().map(arg),
        bias: bias.as_ref().map(arg),
        residual: residual.as_ref().map(arg),
        out: arg(&out),
    };
    let problem = ProductProblem {
        n,
        parts: plan.parts.clone(),
        gate: plan.gate,
        norm: norm.is_some(),
        epsilon: plan.epsilon as f32,
        plus_one: plan.plus_one,
    };
    launched(with_kernels!(problem.parts[0].format(), F => {
        product::launch::<F>(&x.client, bindings, &problem, hardware)
    }));
    out
}

/// Multiplies many rows of `x`: restores one part of the matrix at a time for Burn's matmul.
fn many(x: CubeTensor, words: &CubeTensor, layout: PackedLayout) -> CubeTensor {
    let words = into_contiguous(words.clone());
    let products = parts(&layout).map(|[start, end]| {
        let part = restored(&words, &layout, [start, end - start]);
        CubeBackend::float_matmul(x.clone(), CubeBackend::float_swap_dims(part, 0, 1))
    });
    let mut products: Vec<_> = products.collect();
    match products.len() {
        1 => products.swap_remove(0),
        _ => CubeBackend::float_cat(products, 1),
    }
}

/// Multiplies many rows of `x` by tiles of unpacked weights.
fn tiled(x: CubeTensor, words: &CubeTensor, layout: PackedLayout) -> CubeTensor {
    let (x, words) = (into_contiguous(x), into_contiguous(words.clone()));
    let [n, _] = x.meta.shape().dims();
    let out = empty_like(&x, [n, layout.rows()]);
    launched(with_kernels!(layout.format(), F => {
        tiled::launch::<F>(&x.client, [&x, &words, &out].map(arg), &layout, n)
    }));
    out
}

/// Returns the row ranges, `[start, end]`, that are restored one at a time.
fn parts(layout: &PackedLayout) -> impl Iterator<Item = [usize; 2]> {
    let rows = layout.rows();
    let most = (RESTORED / layout.columns()).max(1);
    (0..rows).step_by(most).map(move |start| [start, (start + most).min(rows)])
}

fn columns(tensor: CubeTensor, start: usize, end: usize) -> CubeTensor {
    let [n, _] = tensor.meta.shape().dims();
    CubeBackend::float_slice(tensor, &[Slice::from(0..n), Slice::from(start..end)])
}

/// Restores the rows `[start, n]` of contiguous words.
fn restored(words: &CubeTensor, layout: &PackedLayout, rows: [usize; 2]) -> CubeTensor {
    let out = empty_like(words, [rows[1], layout.columns()]);
    launched(with_kernels!(layout.format(), F => {
        restore::launch::<F>(&words.client, arg(words), None, arg(&out), layout, rows)
    }));
    out
}

/// Unwraps the result of a launch.
///
/// The public functions check the limits of the device first, so only direct calls of [`WeightOps`]
/// can panic here.
fn launched(result: Result<()>) {
    if let Err(error) = result {
        panic!("{error}");
    }
}

fn arg(tensor: &CubeTensor) -> BufferArg {
    tensor.clone().into_buffer_arg()
}

/// Allocates an f32 tensor on the device of `like`.
fn empty_like(like: &CubeTensor, shape: [usize; 2]) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    empty_device_contiguous_dtype(client, device, Shape::new(shape), DType::F32)
}

#[cfg(all(test, feature = "wgpu"))]
mod wgpu_tests;
