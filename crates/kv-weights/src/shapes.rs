//! Output shapes of operations, as Fusion and clients of burn-remote need them in advance. All
//! outputs are f32.

use burn::tensor::DType;
use burn_fusion::custom::TensorSpec;

use crate::{FusedPlan, PackedLayout};

pub(crate) fn floats(shape: [usize; 2]) -> TensorSpec {
    TensorSpec::new(shape.into(), DType::F32)
}

pub(crate) fn project(x: &TensorSpec, layout: &PackedLayout) -> TensorSpec {
    let [n, _] = x.shape.dims();
    floats([n, layout.rows()])
}

pub(crate) fn fused(x: &TensorSpec, plan: &FusedPlan) -> TensorSpec {
    let [n, _] = x.shape.dims();
    floats([n, plan.outputs()])
}

pub(crate) fn picked(picked: &TensorSpec, layout: &PackedLayout) -> TensorSpec {
    floats([picked.shape.num_elements(), layout.rows()])
}

pub(crate) fn gate(x: &TensorSpec) -> TensorSpec {
    let [n, width] = x.shape.dims();
    floats([n, width / 2])
}

pub(crate) fn project_backward(grad: &TensorSpec, layout: &PackedLayout) -> TensorSpec {
    let [n, _] = grad.shape.dims();
    floats([n, layout.columns()])
}

pub(crate) fn rows(ids: &TensorSpec, layout: &PackedLayout) -> TensorSpec {
    floats([ids.shape.num_elements(), layout.columns()])
}
