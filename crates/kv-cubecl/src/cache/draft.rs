//! Tokens that are kept or removed once their attention is known: guesses of speculative decoding.

use core::ops::Range;

use burn::tensor::{DType, Int, Tensor, TensorData};

use super::{KvCache, state::State};
use crate::{
    Attention, Error, Result,
    layout::{Side, SideLayout},
};

/// The tokens of a [`KvCache::draft`], until [`KvCache::keep`].
#[derive(Clone, Debug)]
pub struct Drafted(Held);

#[derive(Clone, Debug)]
enum Held {
    /// The cache does not hold the tokens yet: keys and values `[batch, n_kv_heads, tokens, _]`.
    Postponed(Box<[Tensor<4>; 2]>),
    /// The cache holds the tokens after the first `lens` of each sequence.
    Appended { lens: Vec<usize>, overwritten: Vec<Overwritten> },
}

/// The float rows of a sequence and side that tokens overwrite.
#[derive(Clone, Debug)]
struct Overwritten {
    sequence: usize,
    side: Side,
    tokens: Range<usize>,
    /// Their earlier contents, `[1, n_kv_heads, tokens, head_dim]`.
    rows: Tensor<4>,
}

impl Drafted {
    /// Takes keys and values `[batch, n_kv_heads, tokens, _]` that no cache holds yet.
    pub(crate) fn postponed(key: Tensor<4>, value: Tensor<4>) -> Self {
        Self(Held::Postponed(Box::new([key, value])))
    }
}

impl KvCache {
    /// Appends tokens as [`attend_ragged`](Self::attend_ragged) does, but so that
    /// [`keep`](Self::keep), which must be the next call, can remove the last ones again without a
    /// trace.
    ///
    /// A new token overwrites a float row in the ring of recent tokens, which is copied first.
    /// Codes are only added, and what is added is written again once its token comes again. With a
    /// sliding window codes are overwritten as well, and chunks do not write the rows of all
    /// tokens. In these cases the tokens are not appended before `keep`.
    ///
    /// # Shapes
    /// - as those of [`attend_ragged`](Self::attend_ragged)
    ///
    /// # Errors
    /// Fails as [`attend_ragged`](Self::attend_ragged) does.
    pub fn draft(
        &mut self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
        tokens: &[usize],
    ) -> Result<(Attention, Drafted)> {
        self.check_ragged("draft", [&query, &key, &value], tokens)?;
        if !self.can_undo(tokens) {
            let attention = self.peek_ragged(query, key.clone(), value.clone(), tokens)?;
            return Ok((attention, Drafted::postponed(key, value)));
        }
        let (lens, overwritten) = (self.lens.clone(), self.overwritten(tokens));
        let attention = self.attend_ragged(query, key, value, tokens)?;
        Ok((attention, Drafted(Held::Appended { lens, overwritten })))
    }

    /// Keeps the first `tokens[i]` of the tokens that [`draft`](Self::draft) appended to sequence
    /// `i`.
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of sequences. Fails as
    /// [`append_ragged`](Self::append_ragged) does.
    pub fn keep(&mut self, drafted: Drafted, tokens: &[usize]) -> Result<()> {
        let batch = self.lens.len();
        if tokens.len() != batch {
            let rule = format!("must be one number for each sequence of batch {batch}");
            let (op, tensor, shape) = ("keep", "tokens", vec![tokens.len()]);
            return Err(Error::Shape { op, tensor, shape, rule });
        }
        let (lens, overwritten) = match drafted.0 {
            Held::Postponed(sides) => {
                let [key, value] = *sides;
                return self.append_ragged(key, value, tokens);
            }
            Held::Appended { lens, overwritten } => (lens, overwritten),
        };
        for Overwritten { sequence, side, tokens: drafted, rows } in overwritten {
            let place = self.layout.sides()[side];
            let first = drafted.start + tokens[sequence];
            for run in place.runs(first..drafted.end) {
                let part = rows.clone().narrow(2, run.start - drafted.start, run.len());
                self.state.put_rows(sequence, &place, run, part);
            }
        }
        for ((len, before), &kept) in self.lens.iter_mut().zip(lens).zip(tokens) {
            *len = before + kept;
        }
        Ok(())
    }

    /// Returns whether a draft of these numbers of tokens can be appended and removed. There must
    /// be no sliding window. In a ring of recent tokens, each token must have its float row, which
    /// a chunk only writes for the tokens that are not quantized at its end, and no token of the
    /// draft may overwrite another.
    fn can_undo(&self, tokens: &[usize]) -> bool {
        let longest = tokens.iter().copied().max().unwrap_or(0);
        self.layout.schedule().sliding_window.is_none()
            && self.rings().all(|(_, place)| self.takes_steps(tokens) && longest <= place.ring)
    }

    /// Returns the sides whose recent tokens are float rows in a ring.
    fn rings(&self) -> impl Iterator<Item = (Side, SideLayout)> {
        let places = self.layout.stored_sides().iter();
        let places = places.map(|&side| (side, self.layout.sides()[side]));
        places.filter(|(_, place)| place.spec.is_some() && place.ring > 0)
    }

    /// Copies the float rows that the next `tokens[i]` tokens of each sequence `i` overwrite.
    fn overwritten(&self, tokens: &[usize]) -> Vec<Overwritten> {
        let mut overwritten = vec![];
        for (side, place) in self.rings() {
            for (sequence, (&len, &n)) in self.lens.iter().zip(tokens).enumerate() {
                if n > 0 {
                    let rows = self.state.rows_of(sequence, &place, len..len + n);
                    overwritten.push(Overwritten { sequence, side, tokens: len..len + n, rows });
                }
            }
        }
        overwritten
    }
}

impl State {
    /// Copies the float rows of consecutive tokens of one sequence and side, `[1, n_kv_heads,
    /// tokens, head_dim]`.
    fn rows_of(&self, sequence: usize, place: &SideLayout, tokens: Range<usize>) -> Tensor<4> {
        let floats = self.floats();
        let [_, heads, _, width] = floats.dims();
        // Rows of the tensor may be narrower than rows of a side.
        let n = place.head_dim / width;
        let rows = |token: usize| (0..n).map(move |i| place.element(token) / width + i);
        let rows: Vec<i32> = tokens.clone().flat_map(rows).map(|row| row as i32).collect();
        let data = TensorData::new(rows, [tokens.len() * n]);
        let rows = Tensor::<1, Int>::from_data(data, (&floats.device(), DType::I32));
        // Selecting copies, so that the next token can be written in place.
        let rows = floats.narrow(0, sequence, 1).select(2, rows);
        rows.reshape([1, heads, tokens.len(), place.head_dim])
    }
}
