//! Attention to tokens of a cache by layers that have no cache of their own.
//!
//! The layer that owns the cache attends first. One token is appended at once, so other layers
//! attend to what the cache holds. The tokens of a chunk are appended after all layers have
//! attended: once they are, a ring may hold newer tokens, or codes instead of floats, where a row
//! of the chunk sees others.

use burn::tensor::{DType, Int, Tensor, TensorData};

use super::{KvCache, check_device};
use crate::{Attention, Error, Result, error::misfit};

impl KvCache {
    /// Attends with a query of the token that was appended last, as the step that appended it did.
    ///
    /// # Shapes
    /// - `query`: `[batch, n_heads, 1, head_dim]`; output: as that of [`attend`](Self::attend)
    ///
    /// # Errors
    /// [`Error::Shape`], or [`Error::Unsupported`] for an empty cache, for sequences of different
    /// lengths, and for a query that records gradients or sits on another device.
    pub fn attend_last(&self, query: Tensor<4>) -> Result<Attention> {
        const OP: &str = "attend_last";
        self.check_query(OP, &query)?;
        if self.is_empty() || !self.is_even() {
            return Err(Error::Unsupported {
                what: format!("{OP} of sequences of {:?} tokens", self.lens),
                why: "they must be of one length above 0; use attend_last_at".to_string(),
            });
        }
        Ok(self.decode(query, self.len()))
    }

    /// Attends with one query per sequence to the tokens up to and including `position`, which the
    /// cache holds already. The kernels read `position` when they run, as in
    /// [`attend_at`](Self::attend_at); a sequence whose position is below 0 is skipped.
    ///
    /// # Shapes
    /// - as those of [`attend_at`](Self::attend_at)
    ///
    /// # Errors
    /// Fails as [`attend_at`](Self::attend_at) does.
    pub fn attend_last_at(&self, query: Tensor<4>, position: &Tensor<1, Int>) -> Result<Attention> {
        const OP: &str = "attend_last_at";
        self.check_query(OP, &query)?;
        self.check_position(OP, position)?;
        Ok(self.state.decode_at(query, position.clone(), self.layout, self.options))
    }

    /// Computes [`attend_last`](Self::attend_last) for the sequences that got a token in a call
    /// with these numbers of `tokens`, 0 or 1. All other rows are padding, as in
    /// [`attend_ragged`](Self::attend_ragged).
    ///
    /// # Errors
    /// Fails as [`attend_last_at`](Self::attend_last_at) does, and for a number above 1.
    pub fn attend_last_ragged(&self, query: Tensor<4>, tokens: &[usize]) -> Result<Attention> {
        const OP: &str = "attend_last_ragged";
        let batch = self.lens.len();
        if tokens.len() != batch || tokens.iter().any(|&n| n > 1) {
            let rule = format!("must be 0 or 1 for each sequence of batch {batch}");
            let (tensor, shape) = ("tokens", tokens.to_vec());
            return Err(Error::Shape { op: OP, tensor, shape, rule });
        }
        let m = query.dims()[2];
        if m == 0 {
            return Err(misfit(OP, "query", query.dims(), "no axis may be empty".to_string()));
        }
        let position = |(&len, &n): (&usize, &usize)| if n == 0 { -1 } else { len as i32 - 1 };
        let positions: Vec<i32> = self.lens.iter().zip(tokens).map(position).collect();
        let positions = TensorData::new(positions, [batch]);
        let positions = Tensor::from_data(positions, (&query.device(), DType::I32));
        Ok(self.attend_last_at(query.narrow(2, 0, 1), &positions)?.padded(m))
    }

    /// Returns the result of [`attend_ragged`](Self::attend_ragged) without appending.
    ///
    /// # Errors
    /// Fails as [`attend_ragged`](Self::attend_ragged) does.
    pub fn peek_ragged(
        &self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
        tokens: &[usize],
    ) -> Result<Attention> {
        self.check_ragged("peek_ragged", [&query, &key, &value], tokens)?;
        let [_, heads, m, _] = query.dims();
        let longest = tokens.iter().copied().max().unwrap_or(0);
        if longest > 0 && self.is_even() && tokens.iter().all(|&n| n == longest) {
            let [query, key, value] = [query, key, value].map(|side| side.narrow(2, 0, longest));
            return Ok(self.attend_chunk(query, key, value).padded(m));
        }
        let one = self.layout_of_one()?;
        let mut attention = Attention::skipped(m, self.layout.shape().head_dim.values, &query);
        for (sequence, &n) in tokens.iter().enumerate().filter(|(_, n)| **n > 0) {
            let [query, key, value] = [&query, &key, &value]
                .map(|side| side.clone().narrow(0, sequence, 1).narrow(2, 0, n));
            let found = self.alone(sequence, one).attend_chunk(query, key, value);
            attention = attention.with_rows(sequence, heads, n, found);
        }
        Ok(attention)
    }

    fn check_query(&self, op: &'static str, query: &Tensor<4>) -> Result<()> {
        let shape = self.layout.shape();
        let [batch, heads, m, head_dim] = query.dims();
        let (kv, keys) = (shape.n_kv_heads, shape.head_dim.keys);
        let fits = (batch, m, head_dim) == (shape.batch, 1, keys);
        if !fits || heads == 0 || !heads.is_multiple_of(kv) {
            let rule = format!(
                "must be one token for batch {}, a multiple of {kv} heads, head_dim {keys}",
                shape.batch
            );
            return Err(misfit(op, "query", query.dims(), rule));
        }
        if !matches!(query.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::Unsupported {
                what: format!("{op}: query of type {:?}", query.dtype()),
                why: "a query is f32, f16 or bf16".to_string(),
            });
        }
        check_device(op, "query", &query.device(), &self.device())?;
        let len = self.capacity();
        crate::backends::check_attend(&self.layout, query.dims(), len, &query.device())
    }
}
