//! DeepSeek-V4 in f64, one token after the other, by the formulas of its published code.

use std::{collections::BTreeMap, fs, path::Path};

use kv_models::deepseek_v4::{Config, LayerKind};
use safetensors::SafeTensors;

use super::{
    minifloat::{e2m1, e4m3, nearest},
    read_tensors,
};

/// The parts of the rounding that a model in f64 does. The released code has all but `rope` and
/// `exact_scales`.
#[derive(Clone, Copy)]
pub(crate) struct Rounding {
    pub(crate) rows: bool,
    pub(crate) entries: bool,
    /// Also rounds channels with rope.
    pub(crate) rope: bool,
    /// Scales are not powers of two.
    pub(crate) exact_scales: bool,
    pub(crate) query_hadamard: bool,
    pub(crate) key_hadamard: bool,
    pub(crate) index: bool,
}

pub(crate) const OFFICIAL: Rounding = Rounding {
    rows: true,
    entries: true,
    rope: false,
    exact_scales: false,
    query_hadamard: true,
    key_hadamard: true,
    index: true,
};

pub(crate) const NONE: Rounding = Rounding {
    rows: false,
    entries: false,
    query_hadamard: false,
    key_hadamard: false,
    index: false,
    ..OFFICIAL
};

/// A model in f64.
pub(crate) struct Oracle {
    config: Config,
    tensors: BTreeMap<String, Vec<f64>>,
    table: Vec<i64>,
    rounding: Rounding,
}

/// The tokens of a sequence, each a row.
type Rows = Vec<Vec<f64>>;

impl Oracle {
    pub(crate) fn new(config: Config, folder: &Path, rounding: Rounding) -> Self {
        let file = folder.join("model.safetensors");
        let values = |(name, _, values): (String, _, Vec<f32>)| {
            (
                name.trim_start_matches("model.").to_string(),
                values.iter().map(|x| f64::from(*x)).collect(),
            )
        };
        let bytes = fs::read(&file).unwrap();
        let table = SafeTensors::deserialize(&bytes).unwrap();
        let table = table.tensor("model.layers.1.ffn.gate.tid2eid").unwrap();
        let table = table.data().chunks(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()));
        let tensors = read_tensors(&file).into_iter().map(values).collect();
        Self { config, tensors, table: table.collect(), rounding }
    }

    fn tensor(&self, name: &str) -> &[f64] {
        self.tensors.get(name).unwrap_or_else(|| panic!("{name}"))
    }

    /// Multiplies by a matrix.
    fn product(&self, name: &str, x: &[f64]) -> Vec<f64> {
        self.tensor(name).chunks(x.len()).map(|row| dot(row, x)).collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let gain = self.tensor(&format!("{name}.weight"));
        unit(x, self.config.norm_epsilon).iter().zip(gain).map(|(x, gain)| x * gain).collect()
    }

    /// Applies rope to the last channels of `x` at `position`; `sign` is -1 to undo it.
    fn rope(&self, x: &[f64], layer: usize, position: usize, sign: f64) -> Vec<f64> {
        let (n, c) = (self.config.rotary_dim, &self.config);
        let window = c.layers[layer] == LayerKind::Window;
        let theta = if window { c.rope_theta } else { c.compressed_rope_theta };
        let (kept, last) = x.split_at(x.len() - n);
        let pair = |(i, pair): (usize, &[f64])| {
            let frequency = theta.powf(-2.0 * i as f64 / n as f64);
            let (sin, cos) = (sign * position as f64 * frequency).sin_cos();
            [pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos]
        };
        kept.iter().copied().chain(last.chunks(2).enumerate().flat_map(pair)).collect()
    }

    /// Rounds blocks to the nearest numbers of a table after division by a scale.
    fn rounded(&self, x: &[f64], table: &[(u8, f64)], block: usize, floor: f64) -> Vec<f64> {
        let largest = table.iter().map(|(_, number)| *number).fold(0.0, f64::max);
        let one = |x: &[f64]| {
            let amax = x.iter().map(|x| x.abs()).fold(floor, f64::max);
            let scale = amax / largest;
            let scale = if self.rounding.exact_scales { scale } else { scale.log2().ceil().exp2() };
            let number = |x: &f64| nearest(table, x / scale).1 * scale;
            x.iter().map(number).collect::<Vec<_>>()
        };
        x.chunks(block).flat_map(one).collect()
    }

    /// Rounds a row of attention, except its channels with rope.
    fn rounded_row(&self, x: Vec<f64>, rounds: bool) -> Vec<f64> {
        if !rounds {
            return x;
        }
        let coded = if self.rounding.rope { x.len() } else { x.len() - self.config.rotary_dim };
        let rounded = self.rounded(&x[..coded], &e4m3(), 64, 1e-4);
        [&rounded[..], &x[coded..]].concat()
    }

    fn rounded_index(&self, x: Vec<f64>, transforms: bool) -> Vec<f64> {
        let x = if transforms { hadamard(&x) } else { x };
        if self.rounding.index { self.rounded(&x, &e2m1(), 32, 6.0 * 2f64.powi(-126)) } else { x }
    }

    /// Computes the compressed rows of a sequence.
    fn compressed(&self, layer: usize, name: &str, x: &Rows) -> Rows {
        let compression = self.config.compression(layer).unwrap();
        let ratio = compression.ratio;
        let bias = self.tensor(&format!("{name}.ape"));
        let content: Rows =
            x.iter().map(|x| self.product(&format!("{name}.wkv.weight"), x)).collect();
        let gate = |(t, x): (usize, &Vec<f64>)| {
            let gate = self.product(&format!("{name}.wgate.weight"), x);
            let bias = bias.chunks(gate.len()).nth(t % ratio).unwrap();
            gate.iter().zip(bias).map(|(gate, bias)| gate + bias).collect()
        };
        let gates: Rows = x.iter().enumerate().map(gate).collect();
        let width = content[0].len() / compression.lanes();
        let entry = |w: usize| {
            // Tokens, and the first channel that they have for this entry.
            let own = (w * ratio..(w + 1) * ratio).map(|t| (t, content[0].len() - width));
            let before = match compression.overlap && w > 0 {
                true => (w - 1) * ratio..w * ratio,
                false => 0..0,
            };
            let slots: Vec<(usize, usize)> = before.map(|t| (t, 0)).chain(own).collect();
            let channel = |c: usize| {
                let gates: Vec<f64> = slots.iter().map(|(t, first)| gates[*t][first + c]).collect();
                let values = slots.iter().map(|(t, first)| content[*t][first + c]);
                softmax(&gates).iter().zip(values).map(|(weight, x)| weight * x).sum()
            };
            let pooled: Vec<f64> = (0..width).map(channel).collect();
            let normed = self.norm(&format!("{name}.norm"), &pooled);
            self.rope(&normed, layer, w * ratio, 1.0)
        };
        (0..x.len() / ratio).map(entry).collect()
    }

    /// Returns the entries that every token attends to.
    fn visible(&self, layer: usize, x: &Rows, low: &Rows) -> Vec<Vec<usize>> {
        let Some(compression) = self.config.compression(layer) else {
            return vec![vec![]; x.len()];
        };
        let complete = |t: usize| (t + 1) / compression.ratio;
        if !self.config.selects(layer) {
            return (0..x.len()).map(|t| (0..complete(t)).collect()).collect();
        }
        let name = |part: &str| format!("layers.{layer}.attn.indexer.{part}");
        let keys = self.compressed(layer, &name("compressor"), x).into_iter();
        let keys: Rows =
            keys.map(|key| self.rounded_index(key, self.rounding.key_hadamard)).collect();
        let token = |t: usize| {
            let query = self.product(&name("wq_b.weight"), &low[t]);
            let weights = self.product(&name("weights_proj.weight"), &x[t]);
            let heads: Rows = query
                .chunks(self.config.index_head_dim)
                .map(|query| self.rope(query, layer, t, 1.0))
                .map(|query| self.rounded_index(query, self.rounding.query_hadamard))
                .collect();
            // Positive factors of all scores do not change their order.
            let score = |key: &Vec<f64>| -> f64 {
                let head = |(head, weight): (&Vec<f64>, &f64)| weight * dot(head, key).max(0.0);
                heads.iter().zip(&weights).map(head).sum()
            };
            let scores: Vec<f64> = keys[..complete(t)].iter().map(score).collect();
            let mut order: Vec<usize> = (0..scores.len()).collect();
            order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
            order.truncate(self.config.top_k);
            order
        };
        (0..x.len()).map(token).collect()
    }

    fn attention(&self, layer: usize, x: &Rows) -> Rows {
        let c = &self.config;
        let name = |part: &str| format!("layers.{layer}.attn.{part}");
        let low: Rows = x
            .iter()
            .map(|x| self.norm(&name("q_norm"), &self.product(&name("wq_a.weight"), x)))
            .collect();
        let row = |(t, x): (usize, &Vec<f64>)| {
            let row = self.norm(&name("norm"), &self.product(&name("wkv.weight"), x));
            self.rounded_row(self.rope(&row, layer, t, 1.0), self.rounding.rows)
        };
        let rows: Rows = x.iter().enumerate().map(row).collect();
        let entries: Rows = match c.compression(layer) {
            None => vec![],
            Some(_) => {
                let entries = self.compressed(layer, &name("compressor"), x).into_iter();
                entries.map(|entry| self.rounded_row(entry, self.rounding.entries)).collect()
            }
        };
        let visible = self.visible(layer, x, &low);
        let token = |t: usize| {
            let query = self.product(&name("wq_b.weight"), &low[t]);
            let seen: Vec<&Vec<f64>> = rows[(t + 1).saturating_sub(c.sliding_window)..=t]
                .iter()
                .chain(visible[t].iter().map(|entry| &entries[*entry]))
                .collect();
            let head = |(query, sink): (&[f64], &f64)| {
                let query = self.rope(&unit(query, c.norm_epsilon), layer, t, 1.0);
                let scale = (c.head_dim as f64).sqrt();
                let mut scores: Vec<f64> =
                    seen.iter().map(|row| dot(&query, row) / scale).collect();
                scores.push(*sink);
                let weights = softmax(&scores);
                let channel =
                    |i| seen.iter().zip(&weights).map(|(row, weight)| row[i] * weight).sum::<f64>();
                let output: Vec<f64> = (0..c.head_dim).map(channel).collect();
                self.rope(&output, layer, t, -1.0)
            };
            let heads = query.chunks(c.head_dim).zip(self.tensor(&name("attn_sink")));
            let heads: Vec<f64> = heads.flat_map(head).collect();
            let width = heads.len() / c.output_groups;
            let weights = self.tensor(&name("wo_a.weight")).chunks(width).collect::<Vec<_>>();
            let group = |(heads, rows): (&[f64], &[&[f64]])| {
                rows.iter().map(|row| dot(row, heads)).collect::<Vec<_>>()
            };
            let groups = heads.chunks(width).zip(weights.chunks(c.output_rank)).flat_map(group);
            self.product(&name("wo_b.weight"), &groups.collect::<Vec<_>>())
        };
        (0..x.len()).map(token).collect()
    }

    fn expert(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let limit = self.config.swiglu_limit;
        let [gate, up] = ["w1", "w3"].map(|part| self.product(&format!("{name}.{part}.weight"), x));
        let inner = gate.iter().zip(up).map(|(gate, up)| {
            let gate = gate.min(limit);
            gate * sigmoid(gate) * up.clamp(-limit, limit)
        });
        self.product(&format!("{name}.w2.weight"), &inner.collect::<Vec<_>>())
    }

    fn experts(&self, layer: usize, x: &[f64], id: u32) -> Vec<f64> {
        let (c, name) = (&self.config, format!("layers.{layer}.ffn"));
        let logits = self.product(&format!("{name}.gate.weight"), x);
        let scores: Vec<f64> = logits.iter().map(|x| x.exp().ln_1p().sqrt()).collect();
        let picked: Vec<usize> = if c.hash_layers.contains(&layer) {
            let ids = &self.table[id as usize * c.experts_per_token..][..c.experts_per_token];
            ids.iter().map(|expert| *expert as usize).collect()
        } else {
            let bias = self.tensor(&format!("{name}.gate.bias"));
            let mut order: Vec<usize> = (0..c.n_experts).collect();
            order.sort_by(|a, b| (scores[*b] + bias[*b]).total_cmp(&(scores[*a] + bias[*a])));
            order.truncate(c.experts_per_token);
            order
        };
        let sum: f64 = picked.iter().map(|i| scores[*i]).sum();
        let mut output = self.expert(&format!("{name}.shared_experts"), x);
        for i in picked {
            let weight = scores[i] / sum * c.routed_scale;
            let expert = self.expert(&format!("{name}.experts.{i}"), x);
            output.iter_mut().zip(expert).for_each(|(sum, x)| *sum += weight * x);
        }
        output
    }

    /// Returns the weights of the streams from their products with `fn`.
    fn products(&self, name: &str, streams: &[f64], scales: &[usize]) -> Vec<f64> {
        let (scale, base) =
            (self.tensor(&format!("{name}_scale")), self.tensor(&format!("{name}_base")));
        let products =
            self.product(&format!("{name}_fn"), &unit(streams, self.config.norm_epsilon));
        let of = |(i, (x, base)): (usize, (&f64, &f64))| x * scale[scales[i]] + base;
        products.iter().zip(base).enumerate().map(of).collect()
    }

    fn join(&self, streams: &[f64], weights: &[f64]) -> Vec<f64> {
        let d = self.config.hidden_size;
        let weight = |i: usize| sigmoid(weights[i]) + self.config.stream_epsilon;
        (0..d).map(|c| (0..weights.len()).map(|i| weight(i) * streams[i * d + c]).sum()).collect()
    }

    /// Applies a sublayer to the streams of all tokens.
    fn sublayer(&self, name: &str, norm: &str, streams: &mut Rows, apply: impl Fn(&Rows) -> Rows) {
        let (n, d, epsilon) =
            (self.config.streams, self.config.hidden_size, self.config.stream_epsilon);
        let scales: Vec<usize> = (0..(2 + n) * n).map(|i| (i / n).min(2)).collect();
        let all: Rows = streams.iter().map(|x| self.products(name, x, &scales)).collect();
        let input = streams.iter().zip(&all).map(|(x, m)| self.norm(norm, &self.join(x, &m[..n])));
        let outputs = apply(&input.collect());
        for ((x, y), m) in streams.iter_mut().zip(outputs).zip(all) {
            let mut a: Rows = m[2 * n..].chunks(n).map(softmax).collect();
            a.iter_mut().flatten().for_each(|x| *x += epsilon);
            let columns = |a: &mut Rows| {
                for j in 0..n {
                    let sum: f64 = a.iter().map(|row| row[j]).sum::<f64>() + epsilon;
                    a.iter_mut().for_each(|row| row[j] /= sum);
                }
            };
            columns(&mut a);
            for _ in 1..self.config.sinkhorn_iterations {
                for row in &mut a {
                    let sum: f64 = row.iter().sum::<f64>() + epsilon;
                    row.iter_mut().for_each(|x| *x /= sum);
                }
                columns(&mut a);
            }
            let old = x.clone();
            for k in 0..n {
                for c in 0..d {
                    let mixed: f64 = (0..n).map(|j| a[j][k] * old[j * d + c]).sum();
                    x[k * d + c] = 2.0 * sigmoid(m[n + k]) * y[c] + mixed;
                }
            }
        }
    }

    /// Returns the logits of all tokens, one token after the other.
    pub(crate) fn logits(&self, ids: &[u32]) -> Vec<f64> {
        let (c, d) = (&self.config, self.config.hidden_size);
        let embedding = self.tensor("embed_tokens.weight");
        let embed = |id: &u32| embedding[*id as usize * d..][..d].repeat(c.streams);
        let mut streams: Rows = ids.iter().map(embed).collect();
        for layer in 0..c.layers.len() {
            let name = |part: &str| format!("layers.{layer}.{part}");
            self.sublayer(&name("hc_attn"), &name("attn_norm"), &mut streams, |x| {
                self.attention(layer, x)
            });
            self.sublayer(&name("hc_ffn"), &name("ffn_norm"), &mut streams, |x| {
                x.iter().zip(ids).map(|(x, id)| self.experts(layer, x, *id)).collect()
            });
        }
        let head = |x: &Vec<f64>| {
            let weights = self.products("hc_head.hc", x, &vec![0; c.streams]);
            self.product("head.weight", &self.norm("norm", &self.join(x, &weights)))
        };
        streams.iter().flat_map(head).collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn unit(x: &[f64], epsilon: f64) -> Vec<f64> {
    let rms = (dot(x, x) / x.len() as f64 + epsilon).sqrt();
    x.iter().map(|x| x / rms).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let largest = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let parts: Vec<f64> = x.iter().map(|x| (x - largest).exp()).collect();
    let sum: f64 = parts.iter().sum();
    parts.iter().map(|x| x / sum).collect()
}

fn hadamard(x: &[f64]) -> Vec<f64> {
    let sign = |i: usize, j: usize| if (i & j).count_ones() % 2 == 1 { -1.0 } else { 1.0 };
    let row = |i| x.iter().enumerate().map(|(j, x)| sign(i, j) * x).sum::<f64>();
    (0..x.len()).map(|i| row(i) / (x.len() as f64).sqrt()).collect()
}
