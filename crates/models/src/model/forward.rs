//! Forward passes of a [`LanguageModel`].

use burn::tensor::{DType, Device, Int, Tensor};
use kv_cubecl::FakeQuantOptions;
use tracing::{span::EnteredSpan, trace_span};

use super::LanguageModel;
use crate::{
    cache::{ModelCache, check_context},
    cache_config::ModelCacheConfig,
    device_use::is_cpu,
    error::{Error, Result},
    generate::ids_to_tensor,
    nn::{AttentionObserver, Packing, soft_capped},
    pass::{Pass, PendingTokens},
    spans::{OPERATION, PASS},
};

impl LanguageModel {
    /// Computes the logits of a whole sequence in parallel. They equal those of a cache of `config`
    /// that is filled token by token, and are differentiable.
    ///
    /// Rope frequencies that depend on the context length
    /// ([`RopeScaling::LongRope`](crate::nn::RopeScaling::LongRope)) follow from the capacity in
    /// `config`, as in such a cache, or from the sequence if it is longer.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, vocab]`
    ///
    /// # Errors
    /// Fails without a token, for more tokens than [`max_positions`](Self::max_positions), and for
    /// a `config` that does not fit the model.
    pub fn forward(
        &self,
        ids: Tensor<2, Int>,
        config: impl Into<ModelCacheConfig>,
    ) -> Result<Tensor<3>> {
        Ok(self.head(self.hidden(ids, config)?))
    }

    /// Appends any number of tokens to every sequence of `cache` and returns the logits after each.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, vocab]`
    ///
    /// # Errors
    /// Fails without a token, for another batch than the cache's, and for more tokens than fit into
    /// the cache or the model. The cache is then unchanged.
    pub fn step(&self, ids: Tensor<2, Int>, cache: &mut ModelCache) -> Result<Tensor<3>> {
        let tokens = cache.tokens_of(ids.dims())?;
        self.logits(ids, Pass::over(cache, &tokens))
    }

    /// Appends a different number of tokens to each sequence: of sequence `i` the first `tokens[i]`
    /// ids. The other ids are padding, and their logits are meaningless. A sequence may have 0
    /// tokens; it has a row of ids and logits nonetheless.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - tokens: 0 to seq for each sequence
    /// - output: `[batch, seq, vocab]`
    ///
    /// # Errors
    /// Fails without a token, for another batch than the cache's, for more tokens than ids, and for
    /// more tokens of a sequence than fit into the cache or the model. The cache is then unchanged.
    pub fn step_ragged(
        &self,
        ids: Tensor<2, Int>,
        tokens: &[usize],
        cache: &mut ModelCache,
    ) -> Result<Tensor<3>> {
        let [batch, seq] = ids.dims();
        cache.check_ragged(batch, seq, tokens)?;
        let packing = packs(cache, &ids.device()).then(|| padding(&ids, tokens)).flatten();
        let Some(packing) = packing else {
            return self.logits(ids, Pass::Ragged { cache, tokens, packing: None });
        };
        let pass = Pass::Ragged { cache, tokens, packing: Some(&packing) };
        let logits = self.logits(packed(ids, &packing), pass)?; // [n, 1, vocab]
        let vocab = logits.dims()[2];
        Ok(packing.pad(logits).reshape([batch, seq, vocab]))
    }

    /// Computes the logits of [`step_ragged`](Self::step_ragged) for tokens that the caller may
    /// reject: the last one of each text, and guesses of the next ones. [`PendingTokens::keep`],
    /// which must be the next call, keeps the accepted ones.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - tokens: 0 to seq for each sequence, seq of one and at least 2
    /// - output: `[n, vocab]`, for the n tokens of all sequences, one after the other
    ///
    /// # Errors
    /// Fails as [`step_ragged`](Self::step_ragged) does, with [`Error::Unsupported`] for a cache
    /// that does not [take drafts](ModelCache::takes_drafts), and without a guess.
    pub fn draft(
        &self,
        ids: Tensor<2, Int>,
        tokens: &[usize],
        cache: &mut ModelCache,
    ) -> Result<(Tensor<2>, PendingTokens)> {
        let [batch, seq] = ids.dims();
        cache.check_ragged(batch, seq, tokens)?;
        if !cache.takes_drafts() {
            let why = "layers with a recurrent state or compressed entries append as they attend";
            return Err(Error::unsupported("a draft", why));
        }
        let longest = tokens.iter().copied().max().unwrap_or(0);
        if longest < 2 || longest < seq {
            let value = format!("{tokens:?}");
            let rule = format!("must be seq of one sequence, {seq}, and at least 2");
            return Err(Error::argument("tokens", value, rule));
        }
        let mut draft = PendingTokens::default();
        let places = padding(&ids, tokens);
        let packing = places.as_ref().filter(|_| packs(cache, &ids.device()));
        let ids = match packing {
            Some(packing) => packed(ids, packing),
            None => ids,
        };
        let logits = self.logits(ids, Pass::Draft { cache, tokens, packing, draft: &mut draft })?;
        let logits = logits.flatten(0, 1);
        Ok(match (&places, packing) {
            (Some(places), None) => (places.pack(logits), draft),
            _ => (logits, draft),
        })
    }

    /// Computes [`forward`](Self::forward) up to the final norm. A caller can then apply
    /// [`head`](Self::head) to a few positions at a time.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    /// Fails as [`forward`](Self::forward) does.
    pub fn hidden(
        &self,
        ids: Tensor<2, Int>,
        config: impl Into<ModelCacheConfig>,
    ) -> Result<Tensor<3>> {
        self.hidden_with(ids, &config.into(), FakeQuantOptions::default(), None)
    }

    /// Computes [`hidden`](Self::hidden) with options of the quantizer in training. Calls
    /// `observer` with every layer's attention.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    /// Fails as [`forward`](Self::forward) does.
    pub fn hidden_with(
        &self,
        ids: Tensor<2, Int>,
        config: &ModelCacheConfig,
        fake_quant: FakeQuantOptions,
        observer: Option<&mut AttentionObserver<'_>>,
    ) -> Result<Tensor<3>> {
        config.validate(self)?;
        check_context(0, ids.dims()[1], "max_positions", self.max_positions())?;
        let observer = observer.map(|observe| observe as &mut AttentionObserver<'_>);
        self.pass(ids, Pass::Parallel { spec: self.spec(), config, fake_quant, observer })
    }

    /// Computes [`step`](Self::step) up to the final norm.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    /// Fails as [`step`](Self::step) does.
    pub fn hidden_step(&self, ids: Tensor<2, Int>, cache: &mut ModelCache) -> Result<Tensor<3>> {
        let tokens = cache.tokens_of(ids.dims())?;
        self.pass(ids, Pass::over(cache, &tokens))
    }

    /// Computes [`hidden_step`](Self::hidden_step) and calls `observer` with every layer's
    /// attention. Rope is applied before the call, so a step takes more launches.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Errors
    /// Fails as [`step`](Self::step) does, and with [`Error::Unsupported`] for sequences of
    /// different lengths.
    pub fn hidden_step_with(
        &self,
        ids: Tensor<2, Int>,
        cache: &mut ModelCache,
        observer: &mut AttentionObserver<'_>,
    ) -> Result<Tensor<3>> {
        cache.tokens_of(ids.dims())?;
        if !cache.is_even() {
            return Err(Error::Unsupported {
                what: format!("observing sequences of {:?} tokens", cache.lens()),
                why: "they must have equal lengths".into(),
            });
        }
        let observer = observer as &mut AttentionObserver<'_>;
        self.pass(ids, Pass::Observed { cache, observer })
    }

    /// Computes [`step`](Self::step) for one token whose position, `[1]` i32, is on the device; see
    /// [`KvCache::attend_at`](kv_cubecl::KvCache::attend_at).
    pub(crate) fn step_at(
        &self,
        ids: Tensor<2, Int>,
        cache: &mut ModelCache,
        position: &Tensor<1, Int>,
    ) -> Result<Tensor<3>> {
        self.logits(ids, Pass::At { cache, position })
    }

    /// Enters the operation of the head, until the end of the scope.
    fn reading_head(&self) -> EnteredSpan {
        let bytes = || self.decoder().head_weight().bytes() as u64;
        trace_span!(target: OPERATION, "head", bytes = bytes()).entered()
    }

    fn pass(&self, ids: Tensor<2, Int>, pass: Pass<'_>) -> Result<Tensor<3>> {
        let _span = trace_span!(target: PASS, "pass", tokens = tokens(&ids)).entered();
        self.decoder().hidden(ids, pass)
    }

    fn logits(&self, ids: Tensor<2, Int>, pass: Pass<'_>) -> Result<Tensor<3>> {
        let states = trace_span!(target: PASS, "pass", tokens = tokens(&ids))
            .in_scope(|| self.decoder().states(ids, pass))?;
        let _span = self.reading_head();
        Ok(self.decoder().logits(states).cast(DType::F32))
    }

    /// Computes the logits of normalized hidden states.
    ///
    /// # Shapes
    /// - hidden: `[batch, seq, hidden]`, in the model's [`dtype`](Self::dtype)
    /// - output: `[batch, seq, vocab]` in f32, with values rounded to the model's type as in the
    ///   transformers library
    pub fn head(&self, hidden: Tensor<3>) -> Tensor<3> {
        let _span = self.reading_head();
        let logits = self.decoder().head_weight().project(hidden);
        soft_capped(logits, self.decoder().logit_softcap()).cast(DType::F32)
    }

    /// Allocates an empty cache for `batch` sequences.
    ///
    /// # Errors
    /// Fails for a `config` that does not fit the model, and on a device that the cache does not
    /// support.
    pub fn new_cache(
        &self,
        config: impl Into<ModelCacheConfig>,
        batch: usize,
        device: &Device,
    ) -> Result<ModelCache> {
        let _span = trace_span!(target: OPERATION, "new_cache").entered();
        let config = config.into();
        config.validate(self)?;
        ModelCache::new(&config, self.spec(), batch, device)
    }

    /// Returns the largest difference between the logits of `ids` in parallel and those of an empty
    /// cache that gets one token at a time. A decoder is right if only rounding differs.
    ///
    /// # Errors
    /// Fails as [`forward`](Self::forward) and [`step`](Self::step) do.
    pub fn streaming_difference(
        &self,
        ids: &[u32],
        config: impl Into<ModelCacheConfig>,
        device: &Device,
    ) -> Result<f32> {
        let config = config.into();
        let mut cache = self.new_cache(&config, 1, device)?;
        let parallel = self.forward(ids_to_tensor(ids, [1, ids.len()], device), config)?;
        let mut largest = 0f32;
        for (i, &id) in ids.iter().enumerate() {
            let logits = self.step(ids_to_tensor(&[id], [1, 1], device), &mut cache)?;
            let difference = (logits - parallel.clone().narrow(1, i, 1)).abs().max();
            largest = largest.max(difference.into_scalar::<f32>());
        }
        Ok(largest)
    }
}

/// Returns the places of the tokens among `ids` `[batch, seq]`; `None` without padding, and if all
/// ids are padding.
fn padding(ids: &Tensor<2, Int>, tokens: &[usize]) -> Option<Packing> {
    let ([batch, seq], n) = (ids.dims(), tokens.iter().sum::<usize>());
    (1..batch * seq).contains(&n).then(|| Packing::new(tokens, seq, &ids.device()))
}

/// Returns whether a pass over `cache` takes its tokens without padding. On a GPU each number of
/// rows would have launches of its own to choose and compile, and padding hardly takes time.
fn packs(cache: &ModelCache, device: &Device) -> bool {
    is_cpu(device) && cache.takes_drafts()
}

/// Returns the ids `[n, 1]` of the tokens among `ids` `[batch, seq]`.
fn packed(ids: Tensor<2, Int>, packing: &Packing) -> Tensor<2, Int> {
    packing.pack_ids(ids.flatten(0, 1)).unsqueeze_dim(1)
}

/// Returns the number of tokens of all sequences.
fn tokens(ids: &Tensor<2, Int>) -> u64 {
    ids.shape().num_elements() as u64
}
