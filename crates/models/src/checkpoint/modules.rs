//! The parts that families are built from, taken out of a checkpoint.

use burn::tensor::TensorData;

use super::weights::Weights;
use crate::{
    error::Result,
    model::LanguageModel,
    nn::{Embedding, LayerNorm, Linear, QkNorms, RmsNorm},
    spec::ModelSpec,
};

impl Weights {
    /// Takes a projection whose rows are those of `parts`, each the name of a module and a number of
    /// rows, in this order.
    ///
    /// # Errors
    ///
    /// A tensor that is missing or has another shape, a type other than f32, f16 and bf16, or values
    /// that are not finite or that the model's type does not reach. The same holds for the other
    /// methods that take tensors.
    pub fn linear(
        &mut self,
        parts: &[(String, usize)],
        d_input: usize,
        bias: bool,
    ) -> Result<Linear> {
        let named = |suffix: &str| -> Vec<_> {
            parts.iter().map(|(name, rows)| (format!("{name}.{suffix}"), *rows)).collect()
        };
        let weight = self.matrix(&named("weight"), d_input)?;
        let bias = if bias { Some(self.vector(&named("bias"))?) } else { None };
        Ok(Linear { weight, bias })
    }

    /// Takes an embedding, `[rows, width]`.
    ///
    /// # Errors
    ///
    /// Those of [`linear`](Self::linear).
    pub fn embedding(&mut self, name: &str, rows: usize, width: usize) -> Result<Embedding> {
        Ok(Embedding { weight: self.matrix(&[(format!("{name}.weight"), rows)], width)? })
    }

    /// Takes the output projection, unless it is `tied` to the embedding.
    ///
    /// # Errors
    ///
    /// Those of [`linear`](Self::linear).
    pub fn head(&mut self, tied: bool, rows: usize, width: usize) -> Result<Option<Linear>> {
        let Some(names) = self.names.filter(|_| !tied) else { return Ok(None) };
        let name = names.head.strip_suffix(".weight").unwrap_or(names.head);
        Ok(Some(self.linear(&[(name.into(), rows)], width, false)?))
    }

    /// Takes the norm `name` over `width` channels, with its bias.
    ///
    /// # Errors
    ///
    /// Those of [`linear`](Self::linear).
    pub fn layer_norm(&mut self, name: &str, width: usize, epsilon: f64) -> Result<LayerNorm> {
        let gamma = self.vector(&[(format!("{name}.weight"), width)])?;
        let beta = Some(self.vector(&[(format!("{name}.bias"), width)])?);
        Ok(LayerNorm { gamma, beta, epsilon })
    }

    /// Takes the norm `name` over `width` channels.
    ///
    /// # Errors
    ///
    /// Those of [`linear`](Self::linear).
    pub fn rms_norm(&mut self, name: &str, width: usize, epsilon: f64) -> Result<RmsNorm> {
        let gamma = self.vector(&[(format!("{name}.weight"), width)])?;
        Ok(RmsNorm { gamma, epsilon, plus_one: false })
    }

    /// Takes the norm `name` over `width` channels, whose gains are stored less 1; in GGUF files they are
    /// stored as they are.
    ///
    /// # Errors
    ///
    /// Those of [`linear`](Self::linear).
    pub fn rms_norm_plus_one(&mut self, name: &str, width: usize, epsilon: f64) -> Result<RmsNorm> {
        if self.is_outline() {
            return Ok(RmsNorm { plus_one: true, ..self.rms_norm(name, width, epsilon)? });
        }
        let mut gamma = self.floats(&format!("{name}.weight"), width)?;
        if self.gguf.is_some() {
            gamma.iter_mut().for_each(|gain| *gain -= 1.0);
        }
        let data = TensorData::new(gamma, [width]).convert_dtype(self.dtype);
        Ok(RmsNorm { gamma: self.param(data), epsilon, plus_one: true })
    }

    /// Takes the norms of the heads of queries and of keys, by these names.
    ///
    /// # Errors
    ///
    /// Those of [`linear`](Self::linear).
    pub fn qk_norms(
        &mut self,
        [query, key]: &[String; 2],
        head_dim: usize,
        epsilon: f64,
    ) -> Result<QkNorms> {
        Ok(QkNorms {
            query: self.rms_norm(query, head_dim, epsilon)?,
            key: self.rms_norm(key, head_dim, epsilon)?,
        })
    }

    /// Takes the layers of `spec`, ends the import as [`finish`](Self::finish) does, and makes the `model` of them.
    /// When the first layer is there, the [`LoadObserver`](crate::LoadObserver) is shown the model that it alone would
    /// make.
    ///
    /// # Errors
    ///
    /// Those of `layer` and of [`finish`](Self::finish).
    pub fn layers<L: Clone, M: Into<LanguageModel>>(
        &mut self,
        spec: &ModelSpec,
        mut layer: impl FnMut(&mut Self, usize) -> Result<L>,
        model: impl Fn(ModelSpec, Vec<L>) -> M,
    ) -> Result<M> {
        let n = spec.layers.len();
        let mut layers = Vec::with_capacity(n);
        for i in 0..n {
            layers.push(layer(self, i)?);
            if i == 0 && n > 1 {
                self.watcher.first_layer(|| model(spec.first(1), layers.clone()).into());
            }
        }
        self.finish()?;
        Ok(model(spec.clone(), layers))
    }
}
