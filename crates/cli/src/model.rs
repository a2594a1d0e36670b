//! Arguments that choose a model and its weights.

use burn::tensor::Device;
use kv_models::{
    LoadOptions, WeightDtype,
    kv_weights::{self, Activations, GroupSize, WeightFormat},
};

use crate::{Backend, MemorySize, ModelSource, loading::MemoryBudget, memory_limit};

/// The model, and the backend that runs it.
#[derive(Clone, Debug, clap::Args)]
pub struct ModelArgs {
    #[command(flatten)]
    /// The files of the model.
    pub source: ModelSource,
    /// Backend to run on.
    #[arg(long, value_enum, default_value = "flex")]
    pub backend: Backend,
    /// Type of the weights and of computation: f32, f16, bf16, or auto for the type of the file. 16
    /// bits take half the memory of f32. On the CPU they make decode faster and prefill slower: a
    /// little in bf16, 2.5x in f16.
    #[arg(long, default_value = "f32")]
    pub dtype: WeightDtype,
    /// Representation of quantized, f16 and bf16 weights in memory. Packed weights take as many
    /// bytes as in the file and are multiplied in f32. By default, weights stay packed for
    /// generation and benchmarks and are restored for perplexity.
    #[arg(long, value_enum)]
    pub weights: Option<Weights>,
    /// Quantize the head to int4, int8 or mxfp4 as it is loaded, in groups of 32. The embedding is
    /// the same matrix if they are tied. Only a head stored in f32, f16 or bf16 can be quantized.
    #[arg(long, value_name = "FORMAT", value_parser = head_format)]
    pub head: Option<WeightFormat>,
    /// Memory limit for weights, cache and activations, such as 8G or 512MiB. Default: the device's
    /// memory, or the free memory. A model that needs more is refused before it is loaded.
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<MemorySize>,
}

/// Representation of quantized weights in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Weights {
    /// Packed, with activations rounded to 16 bits in groups of 32; exact on WGPU and CUDA.
    Packed,
    /// Packed, with exact activations.
    PackedExact,
    /// Packed, with activations rounded to 8 bits in groups of 32 as in llama.cpp: the fastest for
    /// prompts; exact on WGPU and CUDA.
    PackedInt8,
    /// Restored to floats when the model is loaded.
    Restored,
}

impl Weights {
    /// Returns the precision of activations; `None` for weights that are restored.
    pub fn activations(self) -> Option<Activations> {
        match self {
            Self::Packed => Some(Activations::Int16),
            Self::PackedExact => Some(Activations::Exact),
            Self::PackedInt8 => Some(Activations::Int8),
            Self::Restored => None,
        }
    }
}

/// Parses the format of a head.
///
/// # Errors
/// Fails with the list of formats.
pub fn head_format(name: &str) -> Result<WeightFormat, String> {
    match name {
        "int4" => Ok(WeightFormat::Int4(GroupSize::G32)),
        "int8" => Ok(WeightFormat::Int8(GroupSize::G32)),
        "mxfp4" => Ok(WeightFormat::Mxfp4),
        _ => Err("must be int4, int8 or mxfp4".into()),
    }
}

impl ModelArgs {
    /// Returns the memory that the model may take on `device`.
    pub fn memory_budget(&self, device: &Device) -> MemoryBudget {
        MemoryBudget::new(memory_limit(self.memory, device))
    }

    /// Returns the options to load the model on `device`. Without `--weights`, quantized weights
    /// are kept as `default` if the device supports it.
    pub fn options(&self, default: Weights, device: &Device) -> LoadOptions {
        let weights = self.weights.unwrap_or_else(|| match kv_weights::check_device("", device) {
            Ok(()) if self.dtype == WeightDtype::F32 => default,
            _ => Weights::Restored,
        });
        let options = LoadOptions::default().with_dtype(self.dtype).with_head(self.head);
        options.with_packed(weights.activations())
    }
}
