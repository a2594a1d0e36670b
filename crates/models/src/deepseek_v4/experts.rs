//! The mixture of experts of DeepSeek-V4.

use burn::{
    module::{Module, Param},
    tensor::{Int, Tensor, activation},
};

use super::Config;
use crate::{
    checkpoint::Exports,
    decoder::Role,
    error::Result,
    moe::{Routing, Scores},
    nn::{Linear, Routed},
    stack::{LayerSource, LayerVisitor},
};

/// The experts of a layer, an expert for all tokens, and the router that selects some for each.
#[derive(Module, Debug)]
pub struct Experts {
    /// Computes a score for every expert, `[n_experts, hidden]`, in f32.
    pub router: Linear,
    /// The bias of scores in the selection of experts, `[n_experts]`; `None` in layers with a
    /// [`table`](Self::table).
    pub router_bias: Option<Param<Tensor<1>>>,
    /// The experts of each token id, `[vocab, per_token]`, which are not trained; `None` in layers
    /// that select by score.
    pub table: Option<Tensor<2, Int>>,
    /// The experts.
    pub experts: Vec<Expert>,
    /// The expert that computes all tokens.
    pub shared: Expert,
    /// The selection of experts.
    #[module(skip)]
    pub routing: Routing,
}

/// A gated MLP, `down(silu(min(gate(x), limit)) * clamp(up(x), -limit, limit))`.
#[derive(Module, Debug)]
pub struct Expert {
    /// The gate rows, then the up rows: `[2 * intermediate, hidden]`.
    pub gate_up: Linear,
    /// The output projection, `[hidden, intermediate]`.
    pub down: Linear,
    /// The bound of the values of the gate and of the linear part.
    pub limit: f64,
}

impl Expert {
    fn build(config: &Config, name: &str, source: &mut LayerSource<'_>) -> Result<Self> {
        let (width, wide) = (config.hidden_size, config.intermediate_size);
        let [gate, down, up] = names(name);
        Ok(Self {
            gate_up: source.fused(&[(&*gate, wide), (&*up, wide)], width, false)?,
            down: source.residual(&down, [width, wide], false)?,
            limit: config.swiglu_limit,
        })
    }

    fn visit(&self, name: &str, visitor: &mut LayerVisitor<'_>) {
        let wide = self.down.weight.dims()[1];
        let [gate, down, up] = names(name);
        visitor.fused(Role::Mlp, &[(&*gate, wide), (&*up, wide)], &self.gate_up);
        visitor.linear(Role::Mlp, &down, &self.down);
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let gate_up = self.gate_up.forward(x);
        let wide = gate_up.dims()[2] / 2;
        let gate = gate_up.clone().narrow(2, 0, wide).clamp_max(self.limit);
        let up = gate_up.narrow(2, wide, wide).clamp(-self.limit, self.limit);
        self.down.forward(activation::silu(gate) * up)
    }

    fn projections(&mut self) -> [&mut Linear; 2] {
        [&mut self.gate_up, &mut self.down]
    }
}

fn names(expert: &str) -> [String; 3] {
    ["w1", "w2", "w3"].map(|part| format!("{expert}.{part}"))
}

fn numbered(number: usize) -> String {
    format!("ffn.experts.{number}")
}

const ROUTER: &str = "ffn.gate";
const ROUTER_BIAS: &str = "ffn.gate.bias";
const TABLE: &str = "ffn.gate.tid2eid";
const SHARED: &str = "ffn.shared_experts";

impl Experts {
    pub(super) fn build(config: &Config, source: &mut LayerSource<'_>) -> Result<Self> {
        let (n, per_token) = (config.n_experts, config.experts_per_token);
        let (width, layer) = (config.hidden_size, source.index());
        let by_table = config.hash_layers.contains(&layer);
        let shape = [config.vocab_size, per_token];
        let number = |id, column| scattered(layer, id, column, n);
        Ok(Self {
            router: source.linear(ROUTER, [n, width], false)?,
            router_bias: match by_table {
                true => None,
                false => Some(source.vector(ROUTER_BIAS, n, 0.0)?),
            },
            table: match by_table {
                true => Some(source.indices(TABLE, shape, n, number)?),
                false => None,
            },
            experts: (0..n)
                .map(|i| Expert::build(config, &numbered(i), source))
                .collect::<Result<_>>()?,
            shared: Expert::build(config, SHARED, source)?,
            routing: Routing {
                per_token,
                scores: Scores::SqrtSoftplus,
                normalized: true,
                scale: config.routed_scale,
                groups: None,
                f32_logits: true,
            },
        })
    }

    pub(super) fn visit(&self, visitor: &mut LayerVisitor<'_>) {
        let router = &self.router;
        visitor.part(Role::Mlp, router, |exports: &mut Exports, prefix| {
            exports.floats(&format!("{prefix}{ROUTER}"), &router.weight, None);
        });
        if let Some(bias) = &self.router_bias {
            visitor.vector(Role::Mlp, ROUTER_BIAS, bias);
        }
        if let Some(table) = &self.table {
            visitor.part(Role::Mlp, table, |exports: &mut Exports, prefix| {
                exports.indices(&format!("{prefix}{TABLE}"), table);
            });
        }
        for (i, expert) in self.experts.iter().enumerate() {
            expert.visit(&numbered(i), visitor);
        }
        self.shared.visit(SHARED, visitor);
    }

    /// Applies the shared expert and those that the token's id or the router selects.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden]`
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    pub fn forward(&self, x: Tensor<3>, ids: &Tensor<2, Int>, on_device: bool) -> Tensor<3> {
        let ([batch, seq, hidden], n_experts) = (x.dims(), self.experts.len());
        let x = x.reshape([1, batch * seq, hidden]);
        let routed = self.route(&x, ids);
        let expert = |i: usize, x| self.experts[i].forward(x);
        let output = routed.sum(x.clone(), n_experts, on_device, expert);
        (output + self.shared.forward(x)).reshape([batch, seq, hidden])
    }

    /// Selects experts for all tokens, `[1, n, hidden]`.
    fn route(&self, x: &Tensor<3>, ids: &Tensor<2, Int>) -> Routed {
        let n = x.dims()[1];
        let logits = self.router.weight.project_in_f32(x.clone());
        let logits = logits.reshape([n, self.experts.len()]);
        let Routed { picked, weights } = match &self.table {
            Some(table) => {
                let picked = table.clone().select(0, ids.clone().reshape([n]));
                self.routing.weigh(self.routing.scores(logits), picked)
            }
            None => self.routing.route(logits, self.router_bias.as_ref().map(Param::val)),
        };
        Routed { picked, weights: weights.cast(x.dtype()) }
    }

    pub(super) fn projections(&mut self) -> impl Iterator<Item = &mut Linear> {
        let experts = self.experts.iter_mut().chain([&mut self.shared]);
        experts.flat_map(Expert::projections)
    }
}

/// Returns the expert in a column of a made-up table. The experts of an id differ, and all experts
/// get about as many ids. The table depends on nothing else, so a training run that resumes has the
/// same.
fn scattered(layer: usize, id: usize, column: usize, n_experts: usize) -> usize {
    let seed = (((layer as u64) << 32) | id as u64) + 1;
    let mixed = (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33) as usize;
    (mixed + column) % n_experts
}
