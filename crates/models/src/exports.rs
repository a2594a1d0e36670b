//! Named tensors of models that are written.

use std::ops::Range;

use burn::{
    module::Param,
    tensor::{DType, Int, Tensor, TensorData},
};

use crate::nn::{Embedding, LayerNorm, Linear, Matrix, QkNorms, RmsNorm};

/// The names that all checkpoints of a family share.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// The name of the family in messages.
    pub family: &'static str,
    /// The prefix of all names except the head's, such as `model.`; importers use names without it.
    pub prefix: &'static str,
    /// The prefix of the layers' tensors before the number, such as `layers.`.
    pub layers: &'static str,
    /// The token embedding, such as `embed_tokens.weight`.
    pub embedding: &'static str,
    /// The output projection, such as `lm_head.weight`.
    pub head: &'static str,
    /// Further tables with a row for each token of the vocabulary, as `embedding`.
    pub tables: &'static [&'static str],
    /// Other names in files: the end of the name, and the end that importers use instead.
    pub aliases: &'static [(&'static str, &'static str)],
    /// Returns whether a tensor may be left over because it follows from the configuration.
    pub harmless: fn(&str) -> bool,
    /// Another prefix in checkpoints that contain more than the language model.
    pub text_prefix: Option<&'static str>,
    /// The starts of the names of tensors that the language model does not use, each with what they
    /// are for, which a note tells the user.
    pub unused: &'static [(&'static str, &'static str)],
    /// The ends of the names of matrices that never stay packed, because products with their
    /// transpose are needed.
    pub restored: &'static [&'static str],
}

impl Names {
    /// No names and no exceptions, for `..Names::NONE`.
    pub const NONE: Self = Self {
        family: "",
        prefix: "",
        layers: "",
        embedding: "",
        head: "",
        tables: &[],
        aliases: &[],
        harmless: |_| false,
        text_prefix: None,
        unused: &[],
        restored: &[],
    };

    /// Returns whether a matrix never stays packed.
    pub(crate) fn restores(&self, name: &str) -> bool {
        self.restored.iter().any(|end| name.ends_with(end))
    }

    /// Returns a name in a file without the prefix that it has.
    pub(crate) fn without_prefix<'a>(&self, name: &'a str) -> &'a str {
        let text = self.text_prefix.and_then(|prefix| name.strip_prefix(prefix));
        text.or(name.strip_prefix(self.prefix)).unwrap_or(name)
    }
}

/// The tensors of a checkpoint that is written, on the model's device.
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

/// The source of a tensor. Matrices are read, and restored if packed, when they are written.
#[derive(Debug)]
pub(crate) enum Values {
    Vector(Tensor<1>),
    Vectors(Tensor<2>),
    /// Whole numbers, always written as i64.
    Integers(Tensor<2, Int>),
    /// Rows of a matrix, which may be quantized.
    Rows(Matrix, Range<usize>),
    /// A matrix that is quantized or written transposed.
    Transposed(Matrix),
    /// A matrix that is always written as floats.
    Floats(Matrix),
    /// The kernel of a convolution of each channel by itself, `[channels, taps]`, which is written
    /// as floats of shape `[channels, 1, taps]`.
    Depthwise(Matrix),
    /// The matrices of experts, which are quantized to MXFP4 or written transposed.
    Experts(Vec<Matrix>, RowOrder),
}

/// The order of an expert's rows in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// The order in the model.
    Same,
    /// Rows of the first half and of the second half alternate.
    InTurn,
}

impl RowOrder {
    /// Returns the rows of a matrix in this order.
    pub(crate) fn of<const D: usize>(self, rows: Tensor<D>) -> Tensor<D> {
        let dims = rows.dims();
        match self {
            Self::Same => rows,
            Self::InTurn => rows
                .reshape([2, dims[0] / 2, dims[1..].iter().product()])
                .swap_dims(0, 1)
                .reshape(dims),
        }
    }
}

impl Values {
    pub(crate) fn shape(&self) -> Vec<usize> {
        match self {
            Self::Vector(vector) => vector.dims().to_vec(),
            Self::Vectors(vectors) => vectors.dims().to_vec(),
            Self::Integers(numbers) => numbers.dims().to_vec(),
            Self::Rows(matrix, rows) => vec![rows.len(), matrix.dims()[1]],
            Self::Floats(matrix) => matrix.dims().to_vec(),
            Self::Depthwise(matrix) => {
                let [channels, taps] = matrix.dims();
                vec![channels, 1, taps]
            }
            Self::Transposed(matrix) => {
                let [rows, columns] = matrix.dims();
                vec![columns, rows]
            }
            Self::Experts(matrices, _) => {
                let [rows, columns] = matrices.first().map_or([0; 2], Matrix::dims);
                vec![matrices.len(), columns, rows]
            }
        }
    }

    pub(crate) fn data(&self) -> Result<TensorData, String> {
        let data = match self {
            Self::Vector(vector) => vector.try_to_data(),
            Self::Vectors(vectors) => vectors.try_to_data(),
            Self::Integers(numbers) => {
                numbers.try_to_data().map(|data| data.convert_dtype(DType::I64))
            }
            Self::Rows(matrix, rows) => matrix.rows(rows.start, rows.len()).detach().try_to_data(),
            Self::Transposed(matrix) => matrix.val().detach().transpose().try_to_data(),
            Self::Floats(matrix) => matrix.val().detach().try_to_data(),
            Self::Depthwise(matrix) => matrix.val().detach().unsqueeze_dim::<3>(1).try_to_data(),
            Self::Experts(matrices, order) => {
                let transposed =
                    matrices.iter().map(|matrix| order.of(matrix.val().detach()).transpose());
                Tensor::stack::<3>(transposed.collect(), 0).try_to_data()
            }
        };
        data.map_err(|error| error.to_string())
    }
}

impl Values {
    /// Returns the type in a file whose floats have type `floats`.
    pub(crate) fn stored_as(&self, floats: DType) -> DType {
        match self {
            Self::Integers(_) => DType::I64,
            _ => floats,
        }
    }

    /// Returns numbers that identify the tensor: a whole vector, or some rows of a matrix as
    /// stored.
    pub(crate) fn samples(&self) -> Result<Vec<TensorData>, String> {
        let whole = |matrix: &Matrix| matrix.sample(0..matrix.dims()[0]);
        match self {
            Self::Vector(_) | Self::Vectors(_) | Self::Integers(_) => Ok(vec![self.data()?]),
            Self::Rows(matrix, rows) => Ok(vec![matrix.sample(rows.clone())?]),
            Self::Transposed(matrix) | Self::Floats(matrix) | Self::Depthwise(matrix) => {
                Ok(vec![whole(matrix)?])
            }
            Self::Experts(matrices, _) => {
                let ends = matrices.first().into_iter().chain(matrices.last());
                ends.map(whole).collect()
            }
        }
    }
}

impl Exports {
    /// Creates an empty list. Tensors are added under the names of the family's importer, without
    /// its prefix.
    pub fn new(names: &'static Names) -> Self {
        Self { names, tensors: vec![] }
    }

    pub(crate) fn into_tensors(self) -> Vec<Export> {
        self.tensors
    }

    /// Adds the projection `module`, divided into `parts` in this order. Each part is the name of a
    /// module and a number of rows.
    pub fn linear(&mut self, parts: &[(String, usize)], module: &Linear) {
        let bias = module.bias.as_ref().map(value);
        let mut start = 0;
        for (name, rows) in parts {
            self.matrix(name, Values::Rows(module.weight.clone(), start..start + rows));
            if let Some(bias) = &bias {
                self.vector(format!("{name}.bias"), bias.clone().narrow(0, start, *rows));
            }
            start += rows;
        }
    }

    /// Adds a projection that checkpoints store as `[d_input, d_output]` ("Conv1D"), the transpose
    /// of [`Linear`].
    pub fn conv1d(&mut self, name: &str, module: &Linear) {
        self.matrix(name, Values::Transposed(module.weight.clone()));
        if let Some(bias) = &module.bias {
            self.vector(format!("{name}.bias"), value(bias));
        }
    }

    /// Adds an embedding.
    pub fn embedding(&mut self, name: &str, module: &Embedding) {
        let rows = 0..module.weight.dims()[0];
        self.matrix(name, Values::Rows(module.weight.clone(), rows));
    }

    /// Adds a matrix that is never quantized, such as a table of positions or a router, and its
    /// bias.
    pub fn floats(&mut self, name: &str, weight: &Matrix, bias: Option<&Param<Tensor<1>>>) {
        self.matrix(name, Values::Floats(weight.clone()));
        if let Some(bias) = bias {
            self.vector(format!("{name}.bias"), value(bias));
        }
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

    /// Adds the norms of query and key heads.
    pub fn qk_norms(&mut self, [query, key]: &[String; 2], norms: &QkNorms) {
        self.rms_norm(query, &norms.query);
        self.rms_norm(key, &norms.key);
    }

    /// Adds a vector.
    pub fn parameter(&mut self, name: &str, vector: &Param<Tensor<1>>) {
        self.vector(name.into(), value(vector));
    }

    /// Adds a matrix that is never quantized under its full name, which need not end in `.weight`.
    pub fn table(&mut self, name: &str, matrix: &Matrix) {
        self.push(name.into(), Values::Floats(matrix.clone()));
    }

    /// Adds the kernel of a convolution of each channel by itself, `[channels, taps]`.
    pub fn depthwise(&mut self, name: &str, kernel: &Matrix) {
        self.push(name.into(), Values::Depthwise(kernel.clone()));
    }

    /// Adds a table of whole numbers.
    pub fn indices(&mut self, name: &str, numbers: &Tensor<2, Int>) {
        self.push(name.into(), Values::Integers(numbers.clone()));
    }

    /// Adds a projection of every expert of a mixture, `[d_output, d_input]` with a bias. It
    /// becomes one tensor of transposes and one of biases, `NAME_bias`.
    pub(crate) fn experts<'a>(
        &mut self,
        name: &str,
        experts: impl Iterator<Item = &'a Linear>,
        order: RowOrder,
    ) {
        let (matrices, biases): (Vec<_>, Vec<_>) = experts
            .map(|Linear { weight, bias }| {
                (weight.clone(), bias.as_ref().map(|bias| order.of(value(bias))))
            })
            .unzip();
        self.push(name.into(), Values::Experts(matrices, order));
        let biases: Option<Vec<_>> = biases.into_iter().collect();
        if let Some(biases) = biases {
            self.push(format!("{name}_bias"), Values::Vectors(Tensor::stack(biases, 0)));
        }
    }

    fn matrix(&mut self, module: &str, values: Values) {
        self.push(format!("{module}.weight"), values);
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
