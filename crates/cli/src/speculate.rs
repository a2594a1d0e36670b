//! Arguments of speculative decoding.

use anyhow::{Result, bail};
use burn::tensor::Device;
use kv_cubecl::KvCacheConfig;
use kv_models::{DraftModel, LanguageModel, Speculate, Tokenizer};

use crate::{MemoryBudget, MemoryRequest, ModelArgs, ModelSource, Weights, source};

/// Arguments that choose how the tokens after the next one are guessed.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct SpeculateArgs {
    /// Guess the tokens after the next one and compute several at once; texts do not change. lookup
    /// guesses what followed earlier occurrences of the last tokens, while that pays. auto is
    /// lookup on the CPU, for models without recurrent layers.
    #[arg(long, value_enum, value_name = "HOW")]
    speculate: Option<How>,
    /// A smaller model with the same tokens, which guesses where lookup does not.
    #[arg(long, value_name = "MODEL", conflicts_with = "speculate")]
    draft_model: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum How {
    Auto,
    Lookup,
    Never,
}

impl SpeculateArgs {
    /// Returns whether anything was said.
    pub fn is_given(&self) -> bool {
        self.speculate.is_some() || self.draft_model.is_some()
    }

    /// Returns the draft model as it was named.
    pub fn draft_model(&self) -> Option<&str> {
        self.draft_model.as_deref()
    }

    /// Returns how tokens are guessed, `default` if nothing was said. Loads the draft model, if
    /// there is one, into the memory that `budget` has left, with float caches for the sequences
    /// of `request`.
    ///
    /// # Errors
    /// Fails for a draft model that is not found, cannot be loaded, does not fit, or has other
    /// tokens.
    pub fn load(
        &self,
        default: Speculate,
        on: &ModelArgs,
        (model, tokenizer): (&LanguageModel, &Tokenizer),
        budget: &MemoryBudget,
        request: MemoryRequest,
        device: &Device,
    ) -> Result<Speculate> {
        let Some(name) = &self.draft_model else {
            return Ok(match self.speculate {
                None => default,
                Some(How::Auto) => Speculate::Auto,
                Some(How::Lookup) => Speculate::Lookup,
                Some(How::Never) => Speculate::Never,
            });
        };
        let args = ModelArgs { source: ModelSource::of(name), head: None, ..on.clone() };
        let caches = vec![KvCacheConfig::float().into()];
        let request = MemoryRequest { caches, held: vec![], exact: None, ..request };
        let rest = budget.rest();
        let (draft, its) = source::load_within(&args, Weights::Packed, request, rest, device)?;
        budget.add(&its, draft.model.spec());
        check_tokens(name, &draft.tokenizer, tokenizer)?;
        Ok(Speculate::Model(DraftModel::new(draft.model, model)))
    }
}

/// Checks that both tokenizers have the same tokens, except for ids that only one has.
fn check_tokens(name: &str, draft: &Tokenizer, target: &Tokenizer) -> Result<()> {
    for id in 0..draft.n_ids().min(target.n_ids()) as u32 {
        let [its, ours] = [draft, target].map(|tokenizer| tokenizer.id_to_token(id));
        if its != ours {
            let [its, ours] = [its, ours].map(|token| token.unwrap_or_default());
            bail!(
                "draft-model {name}: token {id} is {its:?} there and {ours:?} in the model; both \
                 must have the same tokens"
            );
        }
    }
    Ok(())
}
