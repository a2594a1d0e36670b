//! The parts of a layer by name: [`LayerSource`] builds them, [`LayerVisitor`] visits them.

use burn::{
    module::{Module, Param},
    tensor::{DType, Device, Int, Tensor, TensorData},
};

use super::norm::{ChannelNorm, FinalNorm};
use crate::{
    checkpoint::{Exports, Weights},
    decoder::{Role, Roles},
    error::{Error, Result},
    nn::{Linear, Matrix, QkNorms, RmsNorm, init},
};

/// The source of a layer's parts: a checkpoint, or random numbers.
#[derive(Debug)]
pub struct LayerSource<'a> {
    origin: Origin<'a>,
    /// The start of the names of the layer's tensors.
    pub(super) prefix: String,
    /// The number of the layer.
    pub(super) index: usize,
    epsilon: f64,
    n_layers: usize,
}

#[derive(Debug)]
enum Origin<'a> {
    Checkpoint(&'a mut Weights),
    Random(&'a Device),
}

impl<'a> LayerSource<'a> {
    pub(super) fn checkpoint(weights: &'a mut Weights, prefix: String, epsilon: f64) -> Self {
        Self { origin: Origin::Checkpoint(weights), prefix, index: 0, epsilon, n_layers: 1 }
    }

    pub(super) fn random(device: &'a Device, epsilon: f64, n_layers: usize) -> Self {
        let origin = Origin::Random(device);
        Self { origin, prefix: String::new(), index: 0, epsilon, n_layers }
    }

    /// Returns the number of the layer, counted from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns the full name of a part of the layer.
    pub fn name(&self, part: &str) -> String {
        format!("{}{part}", self.prefix)
    }

    /// Returns whether the checkpoint has the weight of a module.
    pub fn contains(&self, module: &str) -> bool {
        match &self.origin {
            Origin::Checkpoint(weights) => weights.contains(&(self.name(module) + ".weight")),
            Origin::Random(_) => false,
        }
    }

    /// Returns the checkpoint if it is a GGUF file.
    pub(crate) fn gguf(&mut self) -> Option<&mut Weights> {
        match &mut self.origin {
            Origin::Checkpoint(weights) if weights.is_gguf() => Some(weights),
            _ => None,
        }
    }

    /// Returns the checkpoint.
    ///
    /// # Errors
    /// Fails for random numbers.
    pub fn weights(&mut self) -> Result<&mut Weights> {
        match &mut self.origin {
            Origin::Checkpoint(weights) => Ok(weights),
            Origin::Random(_) => {
                Err(Error::unsupported("random weights", "this family needs a checkpoint"))
            }
        }
    }

    /// Builds a projection of shape `[d_output, d_input]`. Random weights have variance
    /// `1 / d_input`.
    ///
    /// # Errors
    /// Fails as [`Weights::linear`] does.
    pub fn linear(&mut self, name: &str, shape: [usize; 2], bias: bool) -> Result<Linear> {
        self.fused(&[(name, shape[0])], shape[1], bias)
    }

    /// Builds a projection that writes to the residual stream. The variance of random weights is
    /// divided by `2 n_layers`, as in GPT-2.
    ///
    /// # Errors
    /// Fails as [`Weights::linear`] does.
    pub fn residual(&mut self, name: &str, shape: [usize; 2], bias: bool) -> Result<Linear> {
        let gain = 1.0 / (2.0 * self.n_layers as f64).sqrt();
        self.with_gain(&[(name, shape[0])], shape[1], bias, gain)
    }

    /// Builds one projection of the rows of several modules, listed with their numbers of rows.
    ///
    /// # Errors
    /// Fails as [`Weights::linear`] does.
    pub fn fused(&mut self, parts: &[(&str, usize)], d_input: usize, bias: bool) -> Result<Linear> {
        self.with_gain(parts, d_input, bias, 1.0)
    }

    fn with_gain(
        &mut self,
        parts: &[(&str, usize)],
        d_input: usize,
        bias: bool,
        gain: f64,
    ) -> Result<Linear> {
        let named = named(&self.prefix, parts);
        match &mut self.origin {
            Origin::Checkpoint(weights) => weights.linear(&named, d_input, bias),
            Origin::Random(device) => {
                let rows = parts.iter().map(|(_, rows)| rows).sum();
                Ok(init::linear([rows, d_input], gain, bias, device))
            }
        }
    }

    /// Builds a projection with a bias that checkpoints store as `[d_input, d_output]`.
    pub(crate) fn conv1d(&mut self, name: &str, d_input: usize, d_output: usize) -> Result<Linear> {
        let name = self.name(name);
        match &mut self.origin {
            Origin::Checkpoint(weights) => weights.conv1d(&name, d_input, d_output),
            Origin::Random(device) => Ok(init::linear([d_output, d_input], 1.0, true, device)),
        }
    }

    /// Builds a vector of `len` numbers. Without a checkpoint they are `fill`.
    ///
    /// # Errors
    /// Fails as [`Weights::linear`] does.
    pub fn vector(&mut self, name: &str, len: usize, fill: f32) -> Result<Param<Tensor<1>>> {
        let name = self.name(name);
        match &mut self.origin {
            Origin::Checkpoint(weights) => weights.parameter(&name, len),
            Origin::Random(device) => Ok(Param::from_tensor(Tensor::full([len], fill, *device))),
        }
    }

    /// Builds a matrix whose name need not end in `.weight`. Random weights have variance
    /// `gain^2 / columns`.
    ///
    /// # Errors
    /// Fails as [`Weights::linear`] does.
    pub fn table(&mut self, name: &str, shape: [usize; 2], gain: f64) -> Result<Matrix> {
        let name = self.name(name);
        match &mut self.origin {
            Origin::Checkpoint(weights) => weights.table(&name, shape),
            Origin::Random(device) => Ok(init::normal(shape, gain, device)),
        }
    }

    /// Builds the kernel of a convolution of each channel by itself, `[channels, taps]`; Hugging
    /// Face files have `[channels, 1, taps]`. Random weights have variance `1 / taps`.
    ///
    /// # Errors
    /// Fails as [`Weights::linear`] does.
    pub fn depthwise(&mut self, name: &str, shape: [usize; 2]) -> Result<Matrix> {
        let name = self.name(name);
        match &mut self.origin {
            Origin::Checkpoint(weights) => weights.depthwise(&name, shape),
            Origin::Random(device) => Ok(init::normal(shape, 1.0, device)),
        }
    }

    /// Builds a table of whole numbers from 0 up to, but not including, `end`, which is not a
    /// parameter. Without a checkpoint, `number` returns the number at a row and a column.
    ///
    /// # Errors
    /// Fails as [`Weights::indices`] does.
    pub fn indices(
        &mut self,
        name: &str,
        shape @ [rows, columns]: [usize; 2],
        end: usize,
        number: impl Fn(usize, usize) -> usize,
    ) -> Result<Tensor<2, Int>> {
        let name = self.name(name);
        match &mut self.origin {
            Origin::Checkpoint(weights) => weights.indices(&name, shape, end),
            Origin::Random(device) => {
                let at = |row| (0..columns).map(move |column| (row, column));
                let numbers = (0..rows).flat_map(at).map(|(i, j)| number(i, j) as i32);
                let numbers = TensorData::new(numbers.collect::<Vec<_>>(), shape);
                Ok(Tensor::from_data(numbers, (*device, DType::I32)))
            }
        }
    }

    /// Builds a norm over `width` channels.
    ///
    /// # Errors
    /// Fails as [`Weights::linear`] does.
    pub fn norm<N: ChannelNorm>(&mut self, name: &str, width: usize) -> Result<N> {
        let name = self.name(name);
        match &mut self.origin {
            Origin::Checkpoint(weights) => N::import(&name, width, self.epsilon, weights),
            Origin::Random(device) => Ok(N::new(width, self.epsilon, device)),
        }
    }

    /// Builds a norm whose gains are stored less 1.
    pub(crate) fn norm_plus_one(&mut self, name: &str, width: usize) -> Result<RmsNorm> {
        let (name, epsilon) = (self.name(name), self.epsilon);
        match &mut self.origin {
            Origin::Checkpoint(weights) => weights.rms_norm_plus_one(&name, width, epsilon),
            Origin::Random(device) => {
                let gamma = Param::from_tensor(Tensor::zeros([width], *device));
                Ok(RmsNorm { gamma, epsilon, plus_one: true })
            }
        }
    }

    /// Builds the norms of the heads of queries and keys.
    ///
    /// # Errors
    /// Fails as [`Weights::linear`] does.
    pub fn qk_norms(&mut self, [query, key]: [&str; 2], head_dim: usize) -> Result<QkNorms> {
        Ok(QkNorms { query: self.norm(query, head_dim)?, key: self.norm(key, head_dim)? })
    }
}

/// Visits the parts of a layer to collect their roles or to export their tensors.
#[derive(Debug)]
pub struct LayerVisitor<'a> {
    target: Target<'a>,
    prefix: String,
    /// The number of the layer.
    pub(super) index: usize,
}

#[derive(Debug)]
enum Target<'a> {
    Roles(&'a mut Roles),
    Exports(&'a mut Exports),
}

impl<'a> LayerVisitor<'a> {
    pub(super) fn roles(roles: &'a mut Roles) -> Self {
        Self { target: Target::Roles(roles), prefix: String::new(), index: 0 }
    }

    pub(super) fn exports(exports: &'a mut Exports, prefix: String) -> Self {
        Self { target: Target::Exports(exports), prefix, index: 0 }
    }

    /// Returns the number of the layer, counted from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Visits a module. `export` adds its tensors; it gets the start of their names.
    pub fn part<M: Module>(
        &mut self,
        role: Role,
        module: &M,
        export: impl FnOnce(&mut Exports, &str),
    ) {
        match &mut self.target {
            Target::Roles(roles) => roles.add(role, module),
            Target::Exports(exports) => export(exports, &self.prefix),
        }
    }

    /// Visits a projection.
    pub fn linear(&mut self, role: Role, name: &str, module: &Linear) {
        self.fused(role, &[(name, module.weight.dims()[0])], module);
    }

    /// Visits a projection whose rows are exported as several modules, listed with their numbers
    /// of rows.
    pub fn fused(&mut self, role: Role, parts: &[(&str, usize)], module: &Linear) {
        self.part(role, module, |exports, prefix| exports.linear(&named(prefix, parts), module));
    }

    /// Visits a projection that checkpoints store as `[d_input, d_output]`.
    pub(crate) fn conv1d(&mut self, role: Role, name: &str, module: &Linear) {
        self.part(role, module, |exports, prefix| {
            exports.conv1d(&format!("{prefix}{name}"), module);
        });
    }

    /// Visits a vector.
    pub fn vector(&mut self, role: Role, name: &str, vector: &Param<Tensor<1>>) {
        self.part(role, vector, |exports, prefix| {
            exports.parameter(&format!("{prefix}{name}"), vector);
        });
    }

    /// Visits a matrix that is never quantized and whose name need not end in `.weight`.
    pub fn table(&mut self, role: Role, name: &str, matrix: &Matrix) {
        self.part(role, matrix, |exports, prefix| {
            exports.table(&format!("{prefix}{name}"), matrix);
        });
    }

    /// Visits the kernel of a convolution of each channel by itself.
    pub fn depthwise(&mut self, role: Role, name: &str, kernel: &Matrix) {
        self.part(role, kernel, |exports, prefix| {
            exports.depthwise(&format!("{prefix}{name}"), kernel);
        });
    }

    /// Visits a norm.
    pub fn norm<N: FinalNorm>(&mut self, role: Role, name: &str, module: &N) {
        let export = |exports: &mut Exports, prefix: &str| {
            module.export(&format!("{prefix}{name}"), exports);
        };
        self.part(role, module, export);
    }

    /// Visits the norms of the heads of queries and keys.
    pub fn qk_norms(&mut self, role: Role, [query, key]: [&str; 2], module: &QkNorms) {
        self.norm(role, query, &module.query);
        self.norm(role, key, &module.key);
    }
}

fn named(prefix: &str, parts: &[(&str, usize)]) -> Vec<(String, usize)> {
    parts.iter().map(|(name, rows)| (format!("{prefix}{name}"), *rows)).collect()
}
