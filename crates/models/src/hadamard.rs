//! Folds the Hadamard transform of values into the weights, so that it costs nothing.

use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::{DType, Tensor},
};
use kv_cubecl::hadamard;

use crate::{
    cache_config::ModelCacheConfig,
    decoder::{Role, Roles},
    model::LanguageModel,
    spec::LayerSpec,
};

impl LanguageModel {
    /// Folds the Hadamard transform of `config` into the weights, if all layers that quantize
    /// values use it
    /// ([`KvCacheConfig::hadamard_values`](kv_cubecl::KvCacheConfig::hadamard_values)). The
    /// projections then return transformed values, and the output projections accept sums of them.
    /// The returned configuration has no transform, and the model computes the same up to rounding.
    ///
    /// Returns model and configuration unchanged if the weights do not allow it. That is the case
    /// for layers of different shapes, for packed weights, for values that are not rows of a fused
    /// projection, and for values in formats that [need](kv_cubecl::KvFormat::needs_hadamard) it.
    #[must_use]
    pub fn fold_hadamard(self, config: ModelCacheConfig) -> (Self, ModelCacheConfig) {
        let layer = self.spec().layers.first().copied();
        let foldable = layer.filter(|layer| {
            let spec = self.spec();
            let alike = |other: &LayerSpec| {
                (other.n_heads, other.n_kv_heads, other.head_dim)
                    == (layer.n_heads, layer.n_kv_heads, layer.head_dim)
            };
            // The transform cannot be applied to the sum of packed weights and an adapter.
            !self.is_adapted()
                && config.validate(spec).is_ok()
                && config.layers(spec).any(|cache| cache.uses_hadamard_values())
                && !config.layers(spec).any(|cache| cache.values.needs_hadamard())
                && config
                    .layers(spec)
                    .all(|it| it.uses_hadamard_values() || !it.values.is_quantized())
                && spec.layers.iter().all(alike)
        });
        let Some(layer) = foldable else { return (self, config) };
        let n_layers = self.n_layers();
        let roles = self.roles();
        let mut fold = Fold { roles: &roles, layer, projections: 0, outputs: 0 };
        let folded = self.clone().map(&mut fold);
        if (fold.projections, fold.outputs) != (n_layers, n_layers) {
            return (self, config);
        }
        (folded, config.without_hadamard_values())
    }
}

/// Transforms the rows of values of fused projections, and the columns of output projections.
struct Fold<'a> {
    roles: &'a Roles,
    layer: LayerSpec,
    /// The number of transformed matrices.
    projections: usize,
    outputs: usize,
}

impl ModuleMapper for Fold<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let shape = param.shape();
        let layer = self.layer;
        let (n_values, head_dim) = (layer.n_kv_heads, layer.head_dim.values);
        match self.roles.get(param.id) {
            Some(Role::Qkv) if shape[0] == layer.qkv_rows() => {
                self.projections += usize::from(D == 2);
                let first = layer.qkv_rows() - n_values * head_dim;
                param.map(|tensor| {
                    // The transpose makes heads of values rows of head_dim.
                    let dims = tensor.dims();
                    let rows = tensor.reshape([dims[0] as i32, -1]);
                    let values = rows.clone().narrow(0, first, n_values * head_dim);
                    let values = transform_rows(values.transpose(), head_dim).transpose();
                    Tensor::cat(vec![rows.narrow(0, 0, first), values], 0).reshape(dims)
                })
            }
            Some(Role::AttentionOutput) if D == 2 && shape[1] == layer.n_heads * head_dim => {
                self.outputs += 1;
                param.map(|tensor| {
                    let dims = tensor.dims();
                    let rows = tensor.reshape([dims[0], dims[1]]);
                    transform_rows(rows, head_dim).reshape(dims)
                })
            }
            _ => param,
        }
    }
}

/// Transforms every `head_dim` columns of a matrix.
fn transform_rows(matrix: Tensor<2>, head_dim: usize) -> Tensor<2> {
    let ([rows, columns], dtype) = (matrix.dims(), matrix.dtype());
    let heads = matrix.cast(DType::F32).reshape([1, rows, columns / head_dim, head_dim]);
    let transformed = hadamard(heads).expect("a cache that fits the heads has checked head_dim");
    transformed.reshape([rows, columns]).cast(dtype)
}
