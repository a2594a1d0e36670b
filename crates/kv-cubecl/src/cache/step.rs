//! Steps of one token per sequence, with positions on the device and rope in the same launches.

use burn::tensor::{DType, Int, Tensor, TensorData};

use super::{KvCache, check_device, state::StepPosition};
use crate::{Attention, Error, Result, RopeTable};

impl KvCache {
    /// Attends with one token at positions that the device holds.
    ///
    /// The kernels read `position` when they run, so one graph capture (see
    /// [`burn::tensor::capture`]) replays at every length. A full cache is attended to and stays
    /// unchanged.
    ///
    /// A sequence whose position is below 0 is skipped: its memory is neither read nor written, its
    /// output is 0 and its `lse` -inf.
    ///
    /// [`len`](Self::len) does not change; call [`advance`](Self::advance) to count the tokens that
    /// such steps appended.
    ///
    /// # Shapes
    /// - `query`: `[batch, n_heads, 1, head_dim]`
    /// - `key`, `value`: `[batch, n_kv_heads, 1, head_dim]`, keys after the position encoding
    /// - `position`: i32, `[1]` for all sequences or `[batch]`, one for each
    /// - all three f32, f16 or bf16; output: as that of [`attend`](Self::attend)
    ///
    /// # Errors
    /// [`Error::Shape`], or [`Error::Unsupported`] for tensors that record gradients or sit on
    /// another device; the cache is then unchanged.
    pub fn attend_at(
        &mut self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
        position: &Tensor<1, Int>,
    ) -> Result<Attention> {
        let step = StepPosition { position: Some(position.clone()), rope: None };
        self.attend_stored_at("attend_at", [query, key, value], step)
    }

    /// Computes [`attend_at`](Self::attend_at) for a query and a key before the position encoding,
    /// and applies `rope` by the token's position. A position past the table uses its last row.
    ///
    /// # Errors
    /// Fails as [`attend_at`](Self::attend_at) does, and with [`Error::Shape`] for a table of more
    /// channels than a key.
    pub fn attend_at_with_rope(
        &mut self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
        position: &Tensor<1, Int>,
        rope: &RopeTable,
    ) -> Result<Attention> {
        let step = StepPosition { position: Some(position.clone()), rope: Some(rope) };
        self.attend_stored_at("attend_at_with_rope", [query, key, value], step)
    }

    /// Computes [`attend`](Self::attend) for one token whose query and key come before the position
    /// encoding, and applies `rope` by the token's position.
    ///
    /// # Shapes
    /// - as those of [`attend_at`](Self::attend_at)
    ///
    /// # Errors
    /// Fails as [`attend`](Self::attend) does, and with [`Error::Shape`] for several tokens, or a
    /// table of more channels than a key or of too few positions; the cache is then unchanged.
    pub fn attend_with_rope(
        &mut self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
        rope: &RopeTable,
    ) -> Result<Attention> {
        const OP: &str = "attend_with_rope";
        let tokens = self.check(OP, &query, &key, &value)?;
        check_one_token(OP, &key, tokens)?;
        self.check_rope(OP, rope)?;
        if self.len() >= rope.positions() {
            let rule = format!("must have a row for position {}", self.len());
            let shape = rope.table().dims().to_vec();
            return Err(Error::Shape { op: OP, tensor: "rope", shape, rule });
        }
        let mut step = StepPosition { position: None, rope: Some(rope) };
        if !self.is_even() {
            let positions = self.lens.iter().map(|&len| len as i32).collect::<Vec<_>>();
            let positions = TensorData::new(positions, [self.lens.len()]);
            step.position = Some(Tensor::from_data(positions, (&query.device(), DType::I32)));
        }
        let attention = self.take_step([query, key, value], step);
        self.lens.iter_mut().for_each(|len| *len += 1);
        Ok(attention)
    }

    /// Makes a step at a position that the device holds.
    fn attend_stored_at(
        &mut self,
        op: &'static str,
        qkv: [Tensor<4>; 3],
        step: StepPosition<'_>,
    ) -> Result<Attention> {
        let [query, key, value] = &qkv;
        let tokens = self.check_tensors(op, query, key, value)?;
        check_one_token(op, key, tokens)?;
        let device = query.device();
        if let Some(position) = &step.position {
            self.check_position(op, position)?;
        }
        if let Some(rope) = step.rope {
            self.check_rope(op, rope)?;
        }
        crate::backends::check_attend(&self.layout, query.dims(), self.capacity(), &device)?;
        self.stepped = true;
        Ok(self.take_step(qkv, step))
    }

    pub(super) fn check_position(&self, op: &'static str, position: &Tensor<1, Int>) -> Result<()> {
        let [positions] = position.dims();
        let batch = self.layout.shape().batch;
        if ![1, batch].contains(&positions) || position.dtype() != DType::I32 {
            let (wanted, found) = (DType::I32, position.dtype());
            let of_each = if batch > 1 { format!(" or [{batch}]") } else { String::new() };
            let rule = format!("must be [1]{of_each} of {wanted:?}, not of {found:?}");
            let (tensor, shape) = ("position", position.dims().to_vec());
            return Err(Error::Shape { op, tensor, shape, rule });
        }
        check_device(op, "position", &position.device(), &self.device())
    }

    /// Makes a step without counting its token.
    fn take_step(&mut self, qkv: [Tensor<4>; 3], step: StepPosition<'_>) -> Attention {
        self.state.step(qkv, step, self.layout, self.len(), self.options)
    }

    fn check_rope(&self, op: &'static str, rope: &RopeTable) -> Result<()> {
        check_device(op, "rope", &rope.table().device(), &self.device())?;
        if self.layout.shape().shares_values {
            let why = "rope would change the first channels of keys, which are the values; apply \
                       rope before the call";
            let what = format!("{op} with a cache whose values are channels of keys");
            return Err(Error::Unsupported { what, why: why.to_string() });
        }
        let head_dim = self.layout.shape().head_dim.keys;
        if rope.rotary_dim() > head_dim {
            let rule = format!("must cover at most the {head_dim} channels of a key");
            let shape = rope.table().dims().to_vec();
            return Err(Error::Shape { op, tensor: "rope", shape, rule });
        }
        Ok(())
    }
}

fn check_one_token(op: &'static str, key: &Tensor<4>, tokens: usize) -> Result<()> {
    if tokens == 1 {
        return Ok(());
    }
    let (tensor, shape) = ("key", key.dims().to_vec());
    Err(Error::Shape { op, tensor, shape, rule: "must be one token".to_string() })
}
