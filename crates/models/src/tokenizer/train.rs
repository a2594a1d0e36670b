//! Learns a vocabulary from texts.

use std::path::Path;

use tokenizers::{
    AddedToken,
    models::{
        TrainerWrapper,
        bpe::{BPE, BpeTrainer},
    },
    pre_tokenizers::byte_level::ByteLevel,
};

use super::{Tokenizer, n_ids, special::Settings};
use crate::error::{Error, Result};

const END_OF_TEXT: &str = "<|endoftext|>";

impl Tokenizer {
    /// Learns byte-level BPE with GPT-2's pre-tokenizer from `texts`, with exactly `vocab_size`
    /// ids. Id 0 is `<|endoftext|>`, the end of a text. The same texts give the same ids.
    ///
    /// # Errors
    /// Returns [`Error::Argument`] if `vocab_size` is below 257, the number of bytes and the end of
    /// text, or above the number of ids that the texts give.
    pub fn train_bpe(
        texts: impl Iterator<Item = impl AsRef<str> + Send> + Send,
        vocab_size: usize,
    ) -> Result<Self> {
        let alphabet = ByteLevel::alphabet();
        let least = alphabet.len() + 1;
        if vocab_size < least {
            let rule = format!("must be at least {least}: the bytes and {END_OF_TEXT}");
            return Err(Error::argument("vocab_size", vocab_size, rule));
        }
        let byte_level = ByteLevel::new(false, true, true);
        let mut inner = tokenizers::Tokenizer::new(BPE::default());
        inner.with_pre_tokenizer(Some(byte_level));
        inner.with_decoder(Some(byte_level));
        let trainer = BpeTrainer::builder()
            .vocab_size(vocab_size)
            .special_tokens(vec![AddedToken::from(END_OF_TEXT, true).normalized(false)])
            .initial_alphabet(alphabet.into_iter().collect())
            .show_progress(false)
            .build();
        let mut trainer = TrainerWrapper::from(trainer);
        inner.train(&mut trainer, texts).map_err(Error::tokenizer)?;

        let n_ids = n_ids(&inner);
        let tokenizer = Self::new(inner, n_ids, [0], Settings::default(), Path::new("tokenizer"))?;
        let n_ids = tokenizer.n_ids();
        if n_ids != vocab_size {
            let rule = format!("the texts give only {n_ids} ids");
            return Err(Error::argument("vocab_size", vocab_size, rule));
        }
        Ok(tokenizer)
    }
}
