//! Gradients of the gated delta rule, compared with finite differences of its definition in f64.

use kv_cubecl::{
    On, Target,
    delta::{DeltaMemory, HeadOrder},
};

use crate::{
    common::{Rng, stamp_autodiff},
    delta_inputs::{Layer, Rule, config, delta_tokens, delta_weights, with_heads},
    sparse_gradients::check,
};

stamp_autodiff!(whole_layers, the_rule_alone);

/// The first layer has two chunks of tokens. Rates are larger than elsewhere: their gradients would
/// otherwise be small differences of large numbers.
fn whole_layers<T: Target>(on: &On<T>) {
    for (seed, (config, batch, tokens)) in [
        (config(1, 2, [4, 3], 2), 1, 66),
        (config(2, 4, [4, 6], 4).with_order(HeadOrder::Tiled), 2, 7),
        (config(2, 4, [6, 4], 4), 1, 9),
        (config(2, 2, [5, 4], 2), 2, 9),
    ]
    .into_iter()
    .enumerate()
    {
        let mut layer = Layer::new(config, batch, tokens, 980 + seed as u64);
        layer.parts[3].data.iter_mut().for_each(|log_rate| *log_rate += 1.5);
        check(
            on,
            &format!("{layer:?}"),
            &layer.parts,
            ["mixed", "rates", "conv", "log_rate", "time_bias", "gain"],
            |[mixed, rates, conv, log_rate, time_bias, gain]| {
                let weights = delta_weights([conv, log_rate, time_bias, gain]);
                let memory = DeltaMemory::Parallel(config);
                with_heads(memory.mix(delta_tokens([mixed, rates]), &weights).unwrap())
            },
            |parts| layer.expected(parts).0,
        );
    }
}

/// The gradients are of outputs and of the last state.
fn the_rule_alone<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(985);
    for (sizes, dims) in [([2, 2, 5], [4, 3]), ([1, 1, 66], [3, 5]), ([1, 2, 1], [2, 2])] {
        let rule = Rule::new(&mut rng, sizes, dims);
        check(
            on,
            &format!("{sizes:?} of {dims:?}"),
            &rule.parts,
            ["query", "key", "value", "log_decay", "strength", "state"],
            |parts| rule.output(parts, true),
            |parts| rule.expected(parts),
        );
    }
}
