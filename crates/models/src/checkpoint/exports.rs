use burn::{module::Param, tensor::Tensor};

use super::Names;
use crate::nn::{Embedding, LayerNorm, Linear, QkNorms, RmsNorm};

/// The tensors of a checkpoint that is to be written, on the model's device.
#[derive(Debug)]
pub struct Exports {
    names: &'static Names,
    tensors: Vec<Export>,
}

/// A tensor under its Hugging Face name.
#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) name: String,
    pub(crate) values: Values,
}

/// The values of a vector, a matrix or several matrices.
#[derive(Debug)]
pub(crate) enum Values {
    Vector(Tensor<1>),
    Matrix(Tensor<2>),
    Matrices(Tensor<3>),
}

impl Exports {
    /// No tensors yet; those that are added are named as the family's importer names them, without
    /// its prefix.
    pub fn new(names: &'static Names) -> Self {
        Self { names, tensors: vec![] }
    }

    pub(crate) fn into_tensors(self) -> Vec<Export> {
        self.tensors
    }

    /// Adds the projection `module`, cut into `parts`: each the name of a module and a number of
    /// rows, in this order.
    pub fn linear(&mut self, parts: &[(String, usize)], module: &Linear) {
        let (weight, bias) = (module.weight.val().detach(), module.bias.as_ref().map(value));
        let mut start = 0;
        for (name, rows) in parts {
            self.matrix(name, weight.clone().narrow(0, start, *rows));
            if let Some(bias) = &bias {
                self.vector(format!("{name}.bias"), bias.clone().narrow(0, start, *rows));
            }
            start += rows;
        }
    }

    /// Adds a projection that checkpoints store as `[d_input, d_output]` ("Conv1D"), the transpose
    /// of [`Linear`].
    pub fn conv1d(&mut self, name: &str, module: &Linear) {
        self.matrix(name, module.weight.val().detach().transpose());
        if let Some(bias) = &module.bias {
            self.vector(format!("{name}.bias"), value(bias));
        }
    }

    /// Adds an embedding.
    pub fn embedding(&mut self, name: &str, module: &Embedding) {
        self.matrix(name, module.weight.val().detach());
    }

    /// Adds a norm with its bias.
    pub fn layer_norm(&mut self, name: &str, module: &LayerNorm) {
        self.vector(format!("{name}.weight"), value(&module.gamma));
        if let Some(beta) = &module.beta {
            self.vector(format!("{name}.bias"), value(beta));
        }
    }

    /// Adds a norm.
    pub fn rms_norm(&mut self, name: &str, module: &RmsNorm) {
        self.vector(format!("{name}.weight"), value(&module.gamma));
    }

    /// Adds the norms of the heads of queries and of keys.
    pub fn qk_norms(&mut self, [query, key]: &[String; 2], norms: &QkNorms) {
        self.rms_norm(query, &norms.query);
        self.rms_norm(key, &norms.key);
    }

    /// Adds a vector.
    pub fn parameter(&mut self, name: &str, vector: &Param<Tensor<1>>) {
        self.vector(name.into(), value(vector));
    }

    /// Adds a projection of each expert of a mixture, `[d_output, d_input]` and its bias, as one tensor of their
    /// transposes and one of the biases, `NAME_bias`.
    pub(crate) fn experts(
        &mut self,
        name: &str,
        experts: impl Iterator<Item = (Tensor<2>, Option<Tensor<1>>)>,
    ) {
        let (weights, biases): (Vec<_>, Vec<_>) = experts.unzip();
        let weights = weights.into_iter().map(|weight| weight.detach().transpose()).collect();
        self.push(name.into(), Values::Matrices(Tensor::stack(weights, 0)));
        let biases: Option<Vec<_>> = biases.into_iter().collect();
        if let Some(biases) = biases {
            let biases = biases.into_iter().map(|bias| bias.detach()).collect();
            self.push(format!("{name}_bias"), Values::Matrix(Tensor::stack(biases, 0)));
        }
    }

    fn matrix(&mut self, module: &str, values: Tensor<2>) {
        self.push(format!("{module}.weight"), Values::Matrix(values));
    }

    fn vector(&mut self, name: String, values: Tensor<1>) {
        self.push(name, Values::Vector(values));
    }

    fn push(&mut self, name: String, values: Values) {
        let prefix = if name == self.names.head { "" } else { self.names.prefix };
        self.tensors.push(Export { name: format!("{prefix}{name}"), values });
    }
}

fn value<const D: usize>(param: &Param<Tensor<D>>) -> Tensor<D> {
    param.val().detach()
}
