//! [`DecoderConfig`]: the configuration of a family.

use std::{fmt::Debug, path::Path};

use crate::{
    checkpoint::Weights,
    error::Result,
    family::{ConfigJson, JsonFields, no_gguf},
    gguf::{GgufNames, Metadata},
    rope_config,
    spec::ModelSpec,
};

/// The configuration of a family, read from a file or made in code.
pub trait DecoderConfig: Clone + Debug + Send + Sync + Sized + 'static {
    /// The values of `model_type` in `config.json` that the family reads.
    const MODEL_TYPES: &'static [&'static str];
    /// The values of `quant_method` in `config.json` that the family reads.
    const QUANTIZATIONS: &'static [&'static str] = &[];
    /// The GGUF architectures that the family reads, with the names of their tensors, as
    /// [`Family::gguf`](crate::family::Family::gguf) returns them.
    const GGUF: &'static [(&'static str, GgufNames)] = &[];

    /// Reads the fields of `config.json`, and adds to `notes` for the user.
    ///
    /// # Errors
    /// Fails for a missing field and for an unsupported feature.
    fn read(json: &ConfigJson<'_>, notes: &mut Vec<String>) -> Result<Self>;

    /// Reads the metadata of a GGUF file, and takes the tensors of the rope.
    ///
    /// # Errors
    /// Fails as [`read`](Self::read) does, and for a family without GGUF files.
    fn read_gguf(metadata: &Metadata<'_>, weights: &mut Weights) -> Result<Self> {
        let _ = weights;
        Err(no_gguf(metadata))
    }

    /// Checks the values that the tensors' shapes do not check; `path` is for messages.
    ///
    /// # Errors
    /// Fails for the first field that breaks a rule.
    fn check(&self, path: &Path) -> Result<()>;

    /// Returns the sizes of the model, layer by layer.
    fn spec(&self) -> ModelSpec;

    /// Returns the epsilon of the norms.
    fn norm_epsilon(&self) -> f64;

    /// Returns whether the output projection is the token embedding.
    fn tied_head(&self) -> bool {
        false
    }

    /// Returns the factor of token embeddings, if the family has one.
    fn embedding_scale(&self) -> Option<f64> {
        None
    }

    /// Returns the starts of the names of tensors that the model does not use, each with what they
    /// are for. [`Names::unused`](crate::checkpoint::Names::unused) has those that do not depend on
    /// the configuration.
    fn unused(&self) -> Vec<(String, &'static str)> {
        vec![]
    }

    /// Returns the bound of the logits, if the family has one; see
    /// [`Decoder::logit_softcap`](crate::decoder::Decoder::logit_softcap).
    fn logit_softcap(&self) -> Option<f64> {
        None
    }

    /// Returns the fields of `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// Fails for a configuration that `config.json` cannot express.
    fn to_json(&self, path: &Path) -> Result<JsonFields>;
}

/// Reads and checks a configuration in `config.json`.
pub(super) fn read<C: DecoderConfig>(json: &ConfigJson<'_>, notes: &mut Vec<String>) -> Result<C> {
    rope_config::check_one_rope(json)?;
    let config = C::read(json, notes)?;
    checked(config, json.path)
}

/// Reads and checks a configuration in a GGUF file.
pub(super) fn read_gguf<C: DecoderConfig>(
    metadata: &Metadata<'_>,
    weights: &mut Weights,
) -> Result<C> {
    checked(C::read_gguf(metadata, weights)?, metadata.path())
}

fn checked<C: DecoderConfig>(config: C, path: &Path) -> Result<C> {
    config.check(path)?;
    rope_config::check_angles(path, &config.spec())?;
    Ok(config)
}
