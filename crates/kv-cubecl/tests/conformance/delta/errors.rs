//! Configurations, tensors and calls that are refused, in one line and without a change of the
//! state.

use burn::tensor::{Device, Tensor};
use kv_cubecl::{
    CacheFloat, Error, On, Result, Target,
    delta::{
        DeltaConfig, DeltaInputs, DeltaMemory, DeltaPart, DeltaState, DeltaTokens, DeltaWeights,
        HeadOrder, gated_delta_rule,
    },
};

use crate::{
    common::stamp,
    delta_inputs::{Layer, config, positions, snapshot},
};

stamp!(
    configurations_are_checked,
    tensors_that_do_not_fit,
    calls_that_do_not_fit,
    slots_that_cannot_be,
    states_that_differ,
    rules_that_do_not_fit,
);

/// Returns the message of an error, which is one line without a full stop.
#[track_caller]
fn message<R: core::fmt::Debug>(result: Result<R>) -> String {
    let message = result.unwrap_err().to_string();
    assert!(!message.contains('\n') && !message.ends_with('.'), "{message:?}");
    message
}

/// Asserts that a call is refused for a field, its value and a rule.
#[track_caller]
fn refused<R: core::fmt::Debug>(result: Result<R>, field: &str, value: &str, rule: &str) {
    let invalid = matches!(result, Err(Error::InvalidConfig { .. }));
    let message = message(result);
    assert!(invalid, "{message}");
    assert!(message.starts_with(&format!("{field} {value}: ")), "{message}, not {field} {value}");
    assert!(message.contains(rule), "{message}, not {rule}");
}

/// Asserts that a call is refused for the shape of a tensor.
#[track_caller]
fn misfit<R: core::fmt::Debug>(result: Result<R>, tensor: &str, shape: &[usize]) {
    let invalid = matches!(result, Err(Error::Shape { .. }));
    let message = message(result);
    assert!(invalid, "{message}");
    let start = format!("{tensor} has shape {shape:?}: ");
    assert!(message.contains(&start), "{message}, not {start}");
}

fn configurations_are_checked<T: Target>(on: &On<T>) {
    let good = config(2, 4, [16, 24], 4);
    for config in [good, good.with_order(HeadOrder::Tiled), good.with_float(CacheFloat::Bf16)] {
        config.validate().unwrap();
    }
    let (zero, multiple) = ("at least 1", "multiple of n_key_heads");
    let float = good.with_float(CacheFloat::F16);
    for (config, field, value, rule) in [
        (config(0, 4, [16, 24], 4), "n_key_heads", "0", zero),
        (config(2, 0, [16, 24], 4), "n_value_heads", "0", zero),
        (config(2, 4, [0, 24], 4), "head_dim.keys", "0", zero),
        (config(2, 4, [16, 0], 4), "head_dim.values", "0", zero),
        (config(2, 4, [16, 24], 0), "conv_tokens", "0", "at least 2"),
        (config(2, 4, [16, 24], 1), "conv_tokens", "1", "at least 2"),
        (config(3, 4, [16, 24], 4), "n_value_heads", "4", multiple),
        (config(4, 2, [16, 24], 4), "n_value_heads", "2", multiple),
        (float, "float", "f16", "f32 or bf16"),
    ] {
        refused(config.validate(), field, value, rule);
        refused(config.memory_bytes(1), field, value, rule);
        refused(config.parts(1), field, value, rule);
        refused(DeltaState::new(&config, 1, on), field, value, rule);
        let layer = Layer::new(good, 1, 2, 970);
        let parallel = DeltaMemory::Parallel(config);
        refused(parallel.mix(layer.tokens(0..2, on), &layer.weights(on)), field, value, rule);
    }
    refused(good.memory_bytes(0), "batch", "0", zero);
    refused(good.parts(0), "batch", "0", zero);
    refused(DeltaState::new(&good, 0, on), "batch", "0", zero);
    message(good.memory_bytes(1 << 40));
    message(config(1 << 40, 1 << 40, [1 << 20, 1 << 20], 4).memory_bytes(1));
}

/// Calls `check` with what every kind of memory gives for one token of each sequence.
#[track_caller]
fn everywhere(
    state: &mut DeltaState,
    tokens: &DeltaTokens,
    weights: &DeltaWeights,
    check: impl Fn(Result<Tensor<3>>),
) {
    let counts = vec![1; state.lens().len()];
    let position = positions(&[3], &state.device());
    let parallel = DeltaMemory::Parallel(*state.config());
    check(parallel.mix(tokens.clone(), weights));
    check(DeltaMemory::Cached(&mut *state).mix(tokens.clone(), weights));
    check(DeltaMemory::Ragged(&mut *state, &counts).mix(tokens.clone(), weights));
    check(DeltaMemory::At(&mut *state, &position).mix(tokens.clone(), weights));
}

fn tensors_that_do_not_fit<T: Target>(on: &On<T>) {
    let device: &Device = on;
    let layer = Layer::new(config(2, 4, [16, 24], 4), 2, 3, 971);
    let mut state = layer.state(on);
    layer.mix(DeltaMemory::Cached(&mut state), 0..3, on);
    let before = snapshot(&state);
    let (tokens, weights) = (layer.tokens(0..1, on), layer.weights(on));
    let channels = 2 * 2 * 16 + 2 * 4 * 24;

    for shape in [[2, 1, channels - 1], [2, 1, channels - 4 * 24]] {
        let mixed = Tensor::zeros(shape, device);
        let wrong = DeltaTokens { mixed, ..tokens.clone() };
        everywhere(&mut state, &wrong, &weights, |result| misfit(result, "mixed", &shape));
    }
    for shape in [[2, 1, 4], [2, 1, 9], [2, 2, 8], [1, 1, 8]] {
        let rates = Tensor::zeros(shape, device);
        let wrong = DeltaTokens { rates, ..tokens.clone() };
        everywhere(&mut state, &wrong, &weights, |result| misfit(result, "rates", &shape));
    }
    let conv_channels = channels - 4 * 24;
    for shape in [[conv_channels, 3], [channels, 4], [4, conv_channels]] {
        let conv = Tensor::zeros(shape, device);
        let wrong = DeltaWeights { conv, ..weights.clone() };
        everywhere(&mut state, &tokens, &wrong, |result| misfit(result, "conv", &shape));
    }
    for n in [2, 5] {
        let vector = || Tensor::<1>::zeros([n], device);
        let wrong = DeltaWeights { log_rate: vector(), ..weights.clone() };
        everywhere(&mut state, &tokens, &wrong, |result| misfit(result, "log_rate", &[n]));
        let wrong = DeltaWeights { time_bias: vector(), ..weights.clone() };
        everywhere(&mut state, &tokens, &wrong, |result| misfit(result, "time_bias", &[n]));
        let wrong = DeltaWeights { gain: vector(), ..weights.clone() };
        everywhere(&mut state, &tokens, &wrong, |result| misfit(result, "gain", &[n]));
    }
    assert!(snapshot(&state) == before, "a refused call wrote");
}

fn calls_that_do_not_fit<T: Target>(on: &On<T>) {
    let layer = Layer::new(config(2, 4, [16, 24], 4), 2, 3, 972);
    let mut state = layer.state(on);
    layer.mix(DeltaMemory::Cached(&mut state), 0..3, on);
    let before = snapshot(&state);
    let weights = layer.weights(on);
    let tokens = || layer.tokens(0..3, on);

    let mut ragged =
        |counts: &[usize]| message(DeltaMemory::Ragged(&mut state, counts).mix(tokens(), &weights));
    for counts in [&[3][..], &[1, 1, 1], &[]] {
        let message = ragged(counts);
        assert!(message.contains("batch 2"), "{counts:?}: {message}");
    }
    for counts in [[4, 1], [0, 4]] {
        let message = ragged(&counts);
        assert!(message.contains(" 4") && message.contains("3 tokens"), "{message}");
    }

    // The batch differs from the batch of the state.
    let other = Layer::new(layer.config, 3, 1, 973);
    let position = positions(&[3], on);
    for kind in 0..3 {
        let memory = match kind {
            0 => DeltaMemory::Cached(&mut state),
            1 => DeltaMemory::Ragged(&mut state, &[1, 1]),
            _ => DeltaMemory::At(&mut state, &position),
        };
        let message = message(memory.mix(other.tokens(0..1, on), &weights));
        assert!(message.contains("[3, 1, "), "{message}");
    }
    // Positions are for one token of each sequence.
    let mut at = |position: &[i32], tokens: DeltaTokens| {
        let position = positions(position, on);
        message(DeltaMemory::At(&mut state, &position).mix(tokens, &weights))
    };
    let message = at(&[3], tokens());
    assert!(message.contains("[2, 3, "), "{message}");
    let message = at(&[3, 3, 3], layer.tokens(0..1, on));
    assert!(message.contains("[3]"), "{message}");
    assert!(snapshot(&state) == before, "a refused call wrote");
    // Not every device has bf16.
    if let Ok(mut rounded) = DeltaState::new(&layer.config.with_float(CacheFloat::Bf16), 2, on) {
        let position = positions(&[3], on);
        let refused = DeltaMemory::At(&mut rounded, &position);
        let message = self::message(refused.mix(layer.tokens(0..1, on), &weights));
        assert!(message.contains("bf16") && message.contains("use f32"), "{message}");
    }
}

fn slots_that_cannot_be<T: Target>(on: &On<T>) {
    let layer = Layer::new(config(2, 4, [16, 24], 4), 2, 20, 974);
    let mut state = layer.state(on);
    layer.mix(DeltaMemory::Ragged(&mut state, &[20, 0]), 0..20, on);
    let alone = state.select(&[0]).unwrap();
    let empty = state.select(&[1]).unwrap();
    let before = snapshot(&state);
    let (beyond, taken) = ("must be below batch 2", "its slot is not free, it holds 20 tokens");
    let free = "holds no token";
    refused(state.remove(1), "sequence", "1", free);
    refused(state.remove(2), "sequence", "2", beyond);
    refused(state.admit(0, &alone), "sequence", "0", taken);
    refused(state.admit(2, &alone), "sequence", "2", beyond);
    refused(state.admit(1, &empty), "sequence", "0", free);
    let both = state.clone();
    refused(state.admit(1, &both), "batch", "2", "1 sequence");
    refused(state.fork(0, 0), "to", "0", taken);
    refused(state.fork(0, 2), "to", "2", beyond);
    refused(state.fork(1, 1), "sequence", "1", free);
    refused(state.fork(7, 1), "sequence", "7", beyond);
    refused(state.truncate(2, 0), "sequence", "2", beyond);
    for len in [1, 5, 19] {
        refused(state.truncate(0, len), "len", &len.to_string(), "checkpoint");
        assert_eq!(state.exact(0, len).unwrap(), 0);
    }
    refused(state.truncate(0, 21), "len", "21", "20 tokens");
    refused(state.exact(0, 21), "len", "21", "20 tokens");
    refused(state.exact(2, 0), "sequence", "2", beyond);
    refused(state.shortest(2), "sequence", "2", beyond);
    refused(state.select(&[0, 2]), "sequence", "2", beyond);
    message(state.select(&[]));
    assert_eq!((state.shortest(0).unwrap(), state.exact(0, 20).unwrap()), (20, 20));
    state.truncate(0, 20).unwrap();
    assert!(snapshot(&state) == before, "a refused call wrote");
    state.admit(1, &alone).unwrap();
    assert_eq!(state.lens(), [20, 20]);
    state.truncate(0, 0).unwrap();
    assert_eq!((state.lens(), state.shortest(1).unwrap()), (&[0, 20][..], 20));
}

fn states_that_differ<T: Target>(on: &On<T>) {
    let layer = Layer::new(config(2, 4, [16, 24], 4), 1, 5, 975);
    let mut alone = layer.state(on);
    layer.mix(DeltaMemory::Cached(&mut alone), 0..5, on);
    let good = layer.config;
    for config in [config(2, 4, [16, 24], 3), good.with_order(HeadOrder::Tiled)] {
        let mut state = DeltaState::new(&config, 2, on).unwrap();
        let before = snapshot(&state);
        let error = state.admit(1, &alone).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
        assert!(snapshot(&state) == before, "a refused call wrote");
        let error = DeltaState::join(&[state, alone.clone()]).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    }
    message(DeltaState::join(&[]));

    let (conv, matrices) = alone.parts();
    let restore = |config: &DeltaConfig, lens: &[usize], conv: &Tensor<3>, matrices: &Tensor<4>| {
        DeltaState::from_parts(config, lens.to_vec(), conv.clone(), matrices.clone(), on)
    };
    restore(&good, &[5], &conv, &matrices).unwrap();
    let [_, _, channels] = conv.dims();
    for shape in [[2, 4, 16, 24], [1, 2, 16, 24], [1, 4, 24, 16]] {
        let wrong = Tensor::zeros(shape, &**on);
        misfit(restore(&good, &[5], &conv, &wrong), DeltaPart::State.name(), &shape);
    }
    for shape in [[2, 3, channels], [1, 4, channels], [1, 3, channels - 1]] {
        let wrong = Tensor::zeros(shape, &**on);
        misfit(restore(&good, &[5], &wrong, &matrices), DeltaPart::Conv.name(), &shape);
    }
    let narrow = restore(&config(2, 4, [24, 16], 4), &[5], &conv, &matrices);
    misfit(narrow, DeltaPart::State.name(), &matrices.dims());
    message(restore(&good, &[5, 5], &conv, &matrices));
    message(restore(&good, &[], &conv, &matrices));
    message(restore(&config(3, 4, [16, 24], 4), &[5], &conv, &matrices));
}

fn rules_that_do_not_fit<T: Target>(on: &On<T>) {
    let device: &Device = on;
    let rule = |query: [usize; 4], key, value, log_decay: [usize; 3], strength, state| {
        let rows = |shape: [usize; 4]| Tensor::<4>::zeros(shape, device);
        let numbers = |shape: [usize; 3]| Tensor::<3>::zeros(shape, device);
        let inputs = DeltaInputs {
            query: rows(query),
            key: rows(key),
            value: rows(value),
            log_decay: numbers(log_decay),
            strength: numbers(strength),
        };
        gated_delta_rule(inputs, Some(rows(state)))
    };
    let (row, value, number, state) = ([2, 3, 5, 8], [2, 3, 5, 6], [2, 3, 5], [2, 3, 8, 6]);
    let (output, last) = rule(row, row, value, number, number, state).unwrap();
    assert_eq!((output.dims(), last.dims()), (value, state));
    for wrong in [[2, 3, 5, 7], [2, 3, 4, 8], [2, 1, 5, 8], [1, 3, 5, 8]] {
        // A query and a key name each other in the rule; either may be the one that is wrong.
        for result in [
            rule(wrong, row, value, number, number, state),
            rule(row, wrong, value, number, number, state),
        ] {
            assert!(matches!(result, Err(Error::Shape { .. })), "{wrong:?}");
            let message = message(result);
            assert!(message.contains("query") || message.contains("key"), "{message}");
        }
    }
    for wrong in [[2, 3, 4, 6], [2, 1, 5, 6], [1, 3, 5, 6]] {
        misfit(rule(row, row, wrong, number, number, state), "value", &wrong);
    }
    for wrong in [[2, 3, 4], [2, 1, 5], [1, 3, 5]] {
        misfit(rule(row, row, value, wrong, number, state), "log_decay", &wrong);
        misfit(rule(row, row, value, number, wrong, state), "strength", &wrong);
    }
    for wrong in [[2, 3, 6, 8], [2, 1, 8, 6], [1, 3, 8, 6]] {
        misfit(rule(row, row, value, number, number, wrong), "state", &wrong);
    }
}
