//! Modules that importers take from a checkpoint.

use burn::{
    module::Param,
    tensor::{Tensor, TensorData},
};

use super::weights::Weights;
use crate::{
    error::{Error, Result},
    exports::Names,
    model::LanguageModel,
    nn::{Embedding, LayerNorm, Linear, Matrix, QkNorms, RmsNorm},
    spec::ModelSpec,
};

impl Weights {
    /// Removes tensors that the language model does not use, and notes how many.
    pub(super) fn forget_unused(&mut self, names: &Names) {
        for (start, what) in names.unused {
            self.forget(start, what);
        }
    }

    /// Removes the tensors whose names begin with `start`, and notes how many. `what` says what
    /// they are for.
    pub(crate) fn forget(&mut self, start: &str, what: &str) {
        let all = self.tensors.len();
        self.tensors.retain(|name, _| !name.starts_with(start));
        let unused = all - self.tensors.len();
        if unused > 0 {
            let tensors = if unused == 1 { "tensor" } else { "tensors" };
            self.notes.push(format!("not read: {unused} {tensors} {start}* ({what})"));
        }
    }

    /// Removes the projections of keys and values, and their norms, of layers that share the cache
    /// of another, and notes how many. Files may contain them, though nothing reads them.
    pub(super) fn forget_shared(&mut self, names: &Names, spec: &ModelSpec) {
        const UNUSED: [&str; 4] = ["k_proj.", "v_proj.", "k_norm.", "v_norm."];
        let (all, start) = (self.tensors.len(), names.layers);
        for (i, _) in spec.layers.iter().enumerate().filter(|(_, layer)| layer.shared.is_some()) {
            let attention = format!("{start}{i}.self_attn.");
            self.tensors.retain(|name, _| {
                let part = name.strip_prefix(&attention);
                !part.is_some_and(|part| UNUSED.iter().any(|unused| part.starts_with(unused)))
            });
        }
        let unused = all - self.tensors.len();
        if unused > 0 {
            self.notes.push(format!(
                "not read: {unused} tensors of keys and values in layers that share a cache"
            ));
        }
    }

    /// Takes a projection whose rows are the rows of `parts` in order. Each part is the name of a
    /// module and a number of rows.
    ///
    /// # Errors
    /// Fails if a tensor is missing, has another shape, a type other than f32, f16 and bf16, or
    /// values that are not finite or exceed the model's type. All methods that take tensors fail in
    /// these cases.
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
    /// Fails as [`linear`](Self::linear) does.
    pub fn embedding(&mut self, name: &str, rows: usize, width: usize) -> Result<Embedding> {
        Ok(Embedding { weight: self.matrix(&[(format!("{name}.weight"), rows)], width)? })
    }

    /// Takes the output projection, unless it is `tied` to the embedding.
    ///
    /// # Errors
    /// Fails as [`linear`](Self::linear) does.
    pub fn head(&mut self, tied: bool, rows: usize, width: usize) -> Result<Option<Linear>> {
        let Some(names) = self.names.filter(|_| !tied) else { return Ok(None) };
        let name = names.head.strip_suffix(".weight").unwrap_or(names.head);
        Ok(Some(self.linear(&[(name.into(), rows)], width, false)?))
    }

    /// Takes the norm `name` over `width` channels, with its bias.
    ///
    /// # Errors
    /// Fails as [`linear`](Self::linear) does.
    pub fn layer_norm(&mut self, name: &str, width: usize, epsilon: f64) -> Result<LayerNorm> {
        let gamma = self.vector(&[(format!("{name}.weight"), width)])?;
        let beta = Some(self.vector(&[(format!("{name}.bias"), width)])?);
        Ok(LayerNorm { gamma, beta, epsilon })
    }

    /// Takes the norm `name` over `width` channels.
    ///
    /// # Errors
    /// Fails as [`linear`](Self::linear) does.
    pub fn rms_norm(&mut self, name: &str, width: usize, epsilon: f64) -> Result<RmsNorm> {
        let gamma = self.vector(&[(format!("{name}.weight"), width)])?;
        Ok(RmsNorm { gamma, epsilon, plus_one: false })
    }

    /// Takes the norm `name` over `width` channels. Gains are stored less 1, except in GGUF files.
    ///
    /// # Errors
    /// Fails as [`linear`](Self::linear) does.
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

    /// Takes the kernel of a convolution of each channel by itself by its full name. Its shape is
    /// `[channels, taps]`, or `[channels, 1, taps]` in Hugging Face files.
    ///
    /// # Errors
    /// Fails as [`linear`](Self::linear) does.
    pub fn depthwise(&mut self, name: &str, [channels, taps]: [usize; 2]) -> Result<Matrix> {
        if let Some(entry) = self.tensors.get_mut(name)
            && entry.tensor.shape[..] == [channels, 1, taps]
        {
            entry.tensor.shape = [channels, taps].into();
        }
        let parts = [(name.to_string(), channels)];
        if self.is_outline() {
            return Ok(self.list_joined::<2>(&parts, &[taps])?.into());
        }
        let data = self.join(&parts, &[taps])?;
        Ok(self.param(data).into())
    }

    /// Takes numbers that are stored as negated exponentials, as the rates of decay in GGUF files.
    ///
    /// # Errors
    /// Fails as [`linear`](Self::linear) does, and for a number that is not below 0.
    pub(crate) fn negated_exponentials(
        &mut self,
        name: &str,
        len: usize,
    ) -> Result<Param<Tensor<1>>> {
        let numbers: Vec<f32> = self.floats(name, len)?.into_iter().map(|x| (-x).ln()).collect();
        if let Some(at) = numbers.iter().position(|x| !x.is_finite()) {
            let why = format!("element {at} must be finite and below 0");
            return Err(Error::Tensor { path: self.path.clone(), tensor: name.into(), why });
        }
        Ok(self.param(TensorData::new(numbers, [len]).convert_dtype(self.dtype)))
    }

    /// Takes the norms of query and key heads by these names.
    ///
    /// # Errors
    /// Fails as [`linear`](Self::linear) does.
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

    /// Takes the layers of `spec`, ends the import as [`finish`](Self::finish) does, and returns
    /// the `model` with these layers. After each layer, the
    /// [`LoadObserver`](crate::LoadObserver) receives a model with this layer only.
    ///
    /// # Errors
    /// Fails as `layer` and [`finish`](Self::finish) do.
    pub fn layers<L: Clone, M: Into<LanguageModel>>(
        &mut self,
        spec: &ModelSpec,
        mut layer: impl FnMut(&mut Self, usize) -> Result<L>,
        model: impl Fn(ModelSpec, Vec<L>) -> M,
    ) -> Result<M> {
        let n = spec.layers.len();
        let mut layers = Vec::with_capacity(n);
        for i in 0..n {
            let layer = layer(self, i)?;
            if let Some(only) = spec.only(i).filter(|_| n > 1) {
                self.watcher.layer(i, &|| model(only.clone(), vec![layer.clone()]).into());
            }
            layers.push(layer);
        }
        self.finish()?;
        self.watcher.end();
        Ok(model(spec.clone(), layers))
    }
}
