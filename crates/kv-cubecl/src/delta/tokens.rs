//! The tokens of a call and the weights of a layer, and what both give for the delta rule.

use burn::tensor::{DType, Device, Tensor, TensorData, activation};

use super::{DeltaConfig, DeltaInputs, HeadOrder, gated_delta_rule};
use crate::{Error, Result};

/// The epsilon under the root of the lengths of queries and keys.
pub(crate) const LENGTH_EPSILON: f64 = 1e-6;

/// The projections of the tokens of a call.
#[derive(Clone, Debug)]
pub struct DeltaTokens {
    /// Queries, keys and values before the convolution, then the gates of the output,
    /// `[batch, tokens, conv_channels + value_channels]`.
    pub mixed: Tensor<3>,
    /// Logits of the strengths, then the time steps, which set the decays,
    /// `[batch, tokens, 2 * n_value_heads]`.
    pub rates: Tensor<3>,
}

impl DeltaTokens {
    pub(super) fn without_autodiff(self) -> Self {
        let Self { mixed, rates } = self;
        Self { mixed: mixed.without_autodiff(), rates: rates.without_autodiff() }
    }
}

/// The weights of a layer between its projections.
#[derive(Clone, Debug)]
pub struct DeltaWeights {
    /// The convolution, `[conv_channels, conv_tokens]`; the last column is for the newest token.
    pub conv: Tensor<2>,
    /// Logarithms of the rates of decay, `[n_value_heads]`.
    pub log_rate: Tensor<1>,
    /// Added to the time steps, `[n_value_heads]`.
    pub time_bias: Tensor<1>,
    /// The gains of the norm of the output, `[head_dim.values]`.
    pub gain: Tensor<1>,
    /// The epsilon of this norm.
    pub epsilon: f64,
}

impl DeltaWeights {
    pub(super) fn without_autodiff(&self) -> Self {
        let Self { conv, log_rate, time_bias, gain, epsilon } = self.clone();
        let [log_rate, time_bias, gain] = [log_rate, time_bias, gain].map(Tensor::without_autodiff);
        Self { conv: conv.without_autodiff(), log_rate, time_bias, gain, epsilon }
    }

    /// Checks the shapes of weights and tokens, and returns the batch and the tokens.
    pub(super) fn check(&self, config: &DeltaConfig, tokens: &DeltaTokens) -> Result<[usize; 2]> {
        let wrong = |tensor, shape: &[usize], expected: &[usize]| {
            let rule = format!("must be {expected:?}");
            Err(Error::Shape { op: "delta rule", tensor, shape: shape.to_vec(), rule })
        };
        let [batch, n, _] = tokens.mixed.dims();
        let (channels, heads) = (config.conv_channels(), config.n_value_heads);
        for (name, part, width) in [
            ("mixed", &tokens.mixed, channels + config.value_channels()),
            ("rates", &tokens.rates, 2 * heads),
        ] {
            if part.dims() != [batch, n, width] {
                return wrong(name, &part.dims(), &[batch, n, width]);
            }
        }
        let conv = [channels, config.conv_tokens];
        if self.conv.dims() != conv {
            return wrong("conv", &self.conv.dims(), &conv);
        }
        for (name, vector, len) in [
            ("log_rate", &self.log_rate, heads),
            ("time_bias", &self.time_bias, heads),
            ("gain", &self.gain, config.head_dim.values),
        ] {
            if vector.dims() != [len] {
                return wrong(name, &vector.dims(), &[len]);
            }
        }
        Ok([batch, n])
    }

    /// Computes the output of all tokens, `[batch, tokens, value_channels]`, and the state after
    /// them. `before` is the state before them; `counts` says how many tokens of each sequence are
    /// not padding, if not all are.
    pub(super) fn whole(
        &self,
        config: &DeltaConfig,
        tokens: DeltaTokens,
        before: Option<Carried>,
        counts: Option<&[usize]>,
    ) -> Result<(Tensor<3>, Carried)> {
        let [batch, n] = self.check(config, &tokens)?;
        let (device, dtype) = (tokens.mixed.device(), tokens.mixed.dtype());
        let (channels, heads) = (config.conv_channels(), config.n_value_heads);
        let (mut mixed, mut rates) = (tokens.mixed.cast(DType::F32), tokens.rates.cast(DType::F32));
        // Padding can hold any numbers, and 0 times NaN is NaN.
        let present = counts.map(|counts| present(counts, n, &device));
        if let Some(present) = &present {
            let absent = present.clone().equal_elem(0.0);
            mixed = mixed.mask_fill(absent.clone(), 0.0);
            rates = rates.mask_fill(absent, 0.0);
        }
        let gate = mixed.clone().narrow(2, channels, config.value_channels());
        let (conv, state) = match before {
            Some(Carried { conv, state }) => (Some(conv), Some(state)),
            None => (None, None),
        };
        let conv =
            conv.unwrap_or_else(|| Tensor::zeros(config.conv_shape(batch), (&device, DType::F32)));
        let inputs = Tensor::cat(vec![conv, mixed.narrow(2, 0, channels)], 1);
        let convolved = self.convolve(config, inputs.clone(), n);

        // [batch, n_value_heads, tokens, head_dim]
        let (width, dim) = (config.key_channels(), config.head_dim.keys);
        let query = with_length_one(config.spread(convolved.clone().narrow(2, 0, width)));
        let query = query * (dim as f64).powf(-0.5);
        let key = with_length_one(config.spread(convolved.clone().narrow(2, width, width)));
        let value = convolved.narrow(2, 2 * width, config.value_channels());
        let value = value.reshape([batch, n, heads, config.head_dim.values]).swap_dims(1, 2);

        let strength = activation::sigmoid(rates.clone().narrow(2, 0, heads));
        let time =
            rates.narrow(2, heads, heads) + self.time_bias.clone().cast(DType::F32).unsqueeze();
        let rate = self.log_rate.clone().cast(DType::F32).exp();
        let log_decay = activation::softplus(time, 1.0) * rate.unsqueeze().neg();
        // Padding has a decay of 1 and a strength of 0.
        let kept = |x: Tensor<3>| {
            let x = match &present {
                Some(present) => x * present.clone(),
                None => x,
            };
            x.swap_dims(1, 2)
        };
        let (log_decay, strength) = (kept(log_decay), kept(strength));
        let inputs_of_rule = DeltaInputs { query, key, value, log_decay, strength };
        let (output, state) = gated_delta_rule(inputs_of_rule, state)?;

        let last = config.conv_tokens - 1;
        let conv = match counts {
            None => inputs.narrow(1, n, last),
            Some(counts) => {
                let of = |(sequence, &count): (usize, &usize)| {
                    inputs.clone().narrow(0, sequence, 1).narrow(1, count, last)
                };
                Tensor::cat(counts.iter().enumerate().map(of).collect(), 0)
            }
        };
        let output = self.gated(output.swap_dims(1, 2), gate);
        Ok((output.cast(dtype), Carried { conv, state }))
    }

    /// Applies the convolution, and SiLU, to the last `n` rows of `[batch, rows, conv_channels]`.
    fn convolve(&self, config: &DeltaConfig, inputs: Tensor<3>, n: usize) -> Tensor<3> {
        let weight = self.conv.clone().cast(DType::F32).transpose(); // [conv_tokens, conv_channels]
        let part = |i: usize| {
            inputs.clone().narrow(1, i, n) * weight.clone().narrow(0, i, 1).unsqueeze::<3>()
        };
        let sum = (1..config.conv_tokens).fold(part(0), |sum, i| sum + part(i));
        activation::silu(sum)
    }

    /// Normalizes the output of each head, `[batch, tokens, n_value_heads, head_dim]`, multiplies
    /// it with SiLU of its gate, and joins the heads.
    fn gated(&self, output: Tensor<4>, gate: Tensor<3>) -> Tensor<3> {
        let squares = output.clone().powi_scalar(2).mean_dim(3);
        let normed = output * (squares + self.epsilon).sqrt().recip();
        let normed = normed * self.gain.clone().cast(DType::F32).unsqueeze();
        normed.reshape(gate.dims()) * activation::silu(gate)
    }
}

/// The state between calls: the last inputs of the convolution, and the matrices.
#[derive(Clone, Debug)]
pub(super) struct Carried {
    pub(super) conv: Tensor<3>,
    pub(super) state: Tensor<4>,
}

impl DeltaConfig {
    /// Cuts queries or keys, `[batch, tokens, key_channels]`, into heads, one for each value head.
    fn spread(&self, x: Tensor<3>) -> Tensor<4> {
        let Self { n_key_heads, n_value_heads, head_dim, order, .. } = *self;
        let [batch, n, _] = x.dims();
        let x = x.reshape([batch, n, n_key_heads, head_dim.keys]).swap_dims(1, 2);
        let per_key = n_value_heads / n_key_heads;
        if per_key == 1 {
            return x;
        }
        let x = match order {
            HeadOrder::Grouped => x.unsqueeze_dim::<5>(2).repeat_dim(2, per_key),
            HeadOrder::Tiled => x.unsqueeze_dim::<5>(1).repeat_dim(1, per_key),
        };
        x.reshape([batch, n_value_heads, n, head_dim.keys])
    }
}

/// Divides vectors by their lengths.
fn with_length_one(x: Tensor<4>) -> Tensor<4> {
    let squares = x.clone().powi_scalar(2).sum_dim(3);
    x * (squares + LENGTH_EPSILON).sqrt().recip()
}

/// Returns 1 for tokens and 0 for padding, `[batch, n, 1]`.
fn present(counts: &[usize], n: usize, device: &Device) -> Tensor<3> {
    let row = |&count: &usize| (0..n).map(move |i| f32::from(u8::from(i < count)));
    let numbers: Vec<f32> = counts.iter().flat_map(row).collect();
    let data = TensorData::new(numbers, [counts.len(), n, 1]);
    Tensor::from_data(data, (device, DType::F32))
}
