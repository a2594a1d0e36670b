//! Each operation once, with inputs that do not depend on the device.

use burn::{
    backend::Dispatch,
    tensor::{DType, Device, Int, Tensor, TensorData},
};
use kv_cubecl::{
    AttentionOptions, CacheFloat, CacheShape, CacheState, Granularity, KvCacheConfig, KvCacheOps,
    KvFormat, Side, Sides, SteGradient, Token, TokenPosition, TokenRope,
    delta::{DeltaConfig, DeltaOps, DeltaStore, StepInputs, StepWeights},
    layout::{CacheLayout, QuantSpec, StreamSpec},
    sparse::{
        AttendInputs, AttendPlan, Compression, PoolInputs, PoolPlan, RowFormat, RowLayout, Rows,
        SparseOps, Stride,
    },
};

use crate::common::Rng;

type Output = (&'static str, TensorData);

/// Random numbers on a device.
struct Inputs<'a> {
    device: &'a Device,
    rng: Rng,
}

impl<'a> Inputs<'a> {
    fn new(device: &'a Device, seed: u64) -> Self {
        Self { device, rng: Rng::new(seed) }
    }

    fn floats<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<D> {
        let n = shape.iter().product::<usize>();
        let numbers: Vec<f32> = (0..n).map(|_| self.rng.normal()).collect();
        Tensor::from_data(TensorData::new(numbers, shape), (self.device, DType::F32))
    }

    fn ints<const D: usize>(&self, numbers: &[i32], shape: [usize; D]) -> Tensor<D, Int> {
        Tensor::from_data(TensorData::new(numbers.to_vec(), shape), (self.device, DType::I32))
    }

    fn words(&self, n: usize) -> Tensor<1, Int> {
        Tensor::zeros([n], (self.device, DType::U32))
    }
}

fn read<const D: usize>(name: &'static str, tensor: Tensor<D>) -> Output {
    (name, tensor.into_data())
}

fn read_ints<const D: usize>(name: &'static str, tensor: Tensor<D, Int>) -> Output {
    (name, tensor.into_data())
}

pub(super) fn quantizers(device: &Device) -> Vec<Output> {
    let mut inputs = Inputs::new(device, 1);
    let shape = [1, 2, 64, 32];
    let x = inputs.floats(shape);
    let grad = inputs.floats(shape);
    let mut outputs = Vec::new();
    for granularity in [Granularity::PerChannel, Granularity::PerToken] {
        let spec = QuantSpec::new(granularity, KvFormat::Affine4, 32).unwrap();
        let packed = <Dispatch as KvCacheOps>::quantize(x.clone().into_dispatch(), spec);
        let packed = Tensor::<4, Int>::from_dispatch(packed);
        outputs.push(read_ints("quantize", packed.clone()));
        let restored = <Dispatch as KvCacheOps>::dequantize(packed.into_dispatch(), spec, shape);
        outputs.push(read("dequantize", Tensor::<4>::from_dispatch(restored)));
        let faked = <Dispatch as KvCacheOps>::fake_quantize(
            x.clone().into_dispatch(),
            spec,
            32,
            SteGradient::Identity,
        );
        outputs.push(read("fake_quantize", Tensor::<4>::from_dispatch(faked)));
        let gradient = <Dispatch as KvCacheOps>::fake_quantize_backward(
            x.clone().into_dispatch(),
            grad.clone().into_dispatch(),
            spec,
            32,
        );
        outputs.push(read("fake_quantize_backward", Tensor::<4>::from_dispatch(gradient)));
    }
    for &float in CacheFloat::ALL {
        let rounded = <Dispatch as KvCacheOps>::round_to(x.clone().into_dispatch(), float);
        outputs.push(read("round_to", Tensor::<4>::from_dispatch(rounded)));
    }
    let transformed = <Dispatch as KvCacheOps>::hadamard(x.into_dispatch());
    outputs.push(read("hadamard", Tensor::<4>::from_dispatch(transformed)));
    outputs
}

/// The tensors of a cache.
fn state(layout: &CacheLayout, inputs: &Inputs<'_>) -> CacheState<Dispatch> {
    let floats = Tensor::<4>::zeros(layout.float_shape(), (inputs.device, DType::F32));
    CacheState {
        keys: inputs.words(layout.words(Side::Keys)).into_dispatch(),
        values: inputs.words(layout.words(Side::Values)).into_dispatch(),
        floats: floats.into_dispatch(),
    }
}

fn read_state(name: &'static str, state: &CacheState<Dispatch>) -> Vec<Output> {
    let CacheState { keys, values, floats } = state.clone();
    vec![
        read_ints(name, Tensor::<1, Int>::from_dispatch(keys)),
        read_ints(name, Tensor::<1, Int>::from_dispatch(values)),
        read(name, Tensor::<4>::from_dispatch(floats)),
    ]
}

pub(super) fn caches(device: &Device) -> Vec<Output> {
    let mut outputs = Vec::new();
    for (seed, name) in ["k4v2-g32-r32", "kint8vint8-s3", "k2v16-g32-r32-s2"].iter().enumerate() {
        let mut inputs = Inputs::new(device, 10 + seed as u64);
        let config: KvCacheConfig = name.parse().unwrap();
        let shape = CacheShape::new(1, 2, 64);
        let layout = CacheLayout::new(&config.with_capacity(128), shape).unwrap();
        let options = AttentionOptions::default();
        let [key, value] = [(); 2].map(|()| inputs.floats([1, 2, 70, 64]));
        let written = <Dispatch as KvCacheOps>::write(
            state(&layout, &inputs),
            key.into_dispatch(),
            value.into_dispatch(),
            layout,
            0,
        );
        outputs.extend(read_state("write", &written));
        let query = inputs.floats([1, 4, 1, 64]);
        let (output, lse) = <Dispatch as KvCacheOps>::decode_attention(
            query.clone().into_dispatch(),
            written.clone(),
            layout,
            70,
            70,
            options,
        );
        outputs.push(read("decode_attention", Tensor::<4>::from_dispatch(output)));
        outputs.push(read("decode_attention", Tensor::<3>::from_dispatch(lse)));
        let (output, lse) = <Dispatch as KvCacheOps>::decode_attention_at(
            query.into_dispatch(),
            written.clone(),
            inputs.ints(&[69], [1]).into_dispatch(),
            layout,
            options,
        );
        outputs.push(read("decode_attention_at", Tensor::<4>::from_dispatch(output)));
        outputs.push(read("decode_attention_at", Tensor::<3>::from_dispatch(lse)));
        outputs.extend(steps(&mut inputs, written, layout));
    }
    outputs
}

/// Two decode steps: one that the host counts, and one with a stored position and rope.
fn steps(
    inputs: &mut Inputs<'_>,
    mut cache: CacheState<Dispatch>,
    layout: CacheLayout,
) -> Vec<Output> {
    let mut outputs = Vec::new();
    let table = inputs.floats([128, 64]).into_dispatch();
    for (len, stored) in [(70, false), (71, true)] {
        let position = match stored {
            false => TokenPosition::Counted,
            true => TokenPosition::Stored(inputs.ints(&[len], [1]).into_dispatch()),
        };
        let rope = match stored {
            false => TokenRope::Absent,
            true => TokenRope::Table(table.clone()),
        };
        let token = Token {
            query: inputs.floats([1, 4, 1, 64]).into_dispatch(),
            key: inputs.floats([1, 2, 1, 64]).into_dispatch(),
            value: inputs.floats([1, 2, 1, 64]).into_dispatch(),
            position,
            rope,
        };
        let options = AttentionOptions::default().with_scale(0.25).with_softcap(30.0);
        let (next, output, lse) =
            <Dispatch as KvCacheOps>::step(cache, token, layout, len as usize, options);
        cache = next;
        outputs.extend(read_state("step", &cache));
        outputs.push(read("step", Tensor::<4>::from_dispatch(output)));
        outputs.push(read("step", Tensor::<3>::from_dispatch(lse)));
    }
    outputs
}

pub(super) fn streams(device: &Device) -> Vec<Output> {
    let mut inputs = Inputs::new(device, 20);
    let config: KvCacheConfig = "k4v2-g32-r32".parse().unwrap();
    let (spec, options) = (StreamSpec::whole(&config), AttentionOptions::default());
    let query = inputs.floats([1, 4, 100, 32]);
    let [key, key_hat, value, value_hat] = [(); 4].map(|()| inputs.floats([1, 2, 100, 32]));
    let sinks = inputs.floats([4]);
    let grad = inputs.floats([1, 4, 100, 32]);
    let all = [&query, &key, &key_hat, &value, &value_hat];
    let given = || all.map(|tensor| tensor.clone().into_dispatch());
    let [q, k, k_hat, v, v_hat] = given();
    let (output, lse) =
        <Dispatch as KvCacheOps>::streaming_attention(q, k, k_hat, v, v_hat, spec, options);
    let (output, lse) = (Tensor::<4>::from_dispatch(output), Tensor::<3>::from_dispatch(lse));
    let mut outputs =
        vec![read("streaming_attention", output.clone()), read("streaming_attention", lse.clone())];
    let (with_sinks, lse_with_sinks) = <Dispatch as KvCacheOps>::add_sinks(
        output.clone().into_dispatch(),
        lse.clone().into_dispatch(),
        sinks.clone().into_dispatch(),
    );
    outputs.push(read("add_sinks", Tensor::<4>::from_dispatch(with_sinks)));
    outputs.push(read("add_sinks", Tensor::<3>::from_dispatch(lse_with_sinks)));
    let [q, k, k_hat, v, v_hat] = given();
    let (with_sinks, lse_with_sinks) = <Dispatch as KvCacheOps>::streaming_attention_with_sinks(
        q,
        k,
        k_hat,
        v,
        v_hat,
        sinks.into_dispatch(),
        spec,
        options,
    );
    outputs.push(read("streaming_attention_with_sinks", Tensor::<4>::from_dispatch(with_sinks)));
    outputs
        .push(read("streaming_attention_with_sinks", Tensor::<3>::from_dispatch(lse_with_sinks)));
    let [q, k, k_hat, v, v_hat] = given();
    let (q, k, k_hat, v, v_hat) = <Dispatch as KvCacheOps>::streaming_attention_backward(
        q,
        k,
        k_hat,
        v,
        v_hat,
        output.into_dispatch(),
        lse.into_dispatch(),
        grad.into_dispatch(),
        spec,
        options,
    );
    for gradient in [q, k, k_hat, v, v_hat] {
        let gradient = Tensor::<4>::from_dispatch(gradient);
        outputs.push(read("streaming_attention_backward", gradient));
    }
    outputs
}

pub(super) fn sparse(device: &Device) -> Vec<Output> {
    let mut inputs = Inputs::new(device, 30);
    let (slots, width) = (16, 32);
    let formats = [RowFormat::float(CacheFloat::F32), RowFormat::codes(KvFormat::Int8)];
    let [plain, coded] = formats.map(|format| RowLayout { batch: 1, slots, width, format });
    let mut outputs = Vec::new();
    // Of the tokens of a call: how many were there before, and how many come.
    let [first, second] = [[0, 8], [8, 0]].map(|span| inputs.ints(&span, [2, 1]).into_dispatch());
    let rows = inputs.floats([1, 8, width]);
    let [window, entries] = [plain, coded].map(|layout| {
        let store = Rows {
            codes: inputs.words(layout.words()).into_dispatch(),
            floats: Tensor::<3>::zeros(layout.float_shape(), (device, DType::F32)).into_dispatch(),
        };
        let rows = rows.clone().into_dispatch();
        let span = first.clone();
        <Dispatch as SparseOps>::put_rows(store, rows, span, layout, Stride::TOKENS)
    });
    for Rows { codes, floats } in [window.clone(), entries.clone()] {
        outputs.push(read_ints("put_rows", Tensor::<1, Int>::from_dispatch(codes)));
        outputs.push(read("put_rows", Tensor::<3>::from_dispatch(floats)));
    }
    let tail = <Dispatch as SparseOps>::tail_rows(window.floats.clone(), second, plain, 3, 8);
    outputs.push(read("tail_rows", Tensor::<3>::from_dispatch(tail)));
    let compression = Compression::new(4);
    let pool = PoolInputs {
        content: inputs.floats([1, slots, width]).into_dispatch(),
        gate: inputs.floats([1, slots, width]).into_dispatch(),
        position_bias: inputs.floats([4, width]).into_dispatch(),
        gain: inputs.floats([width]).into_dispatch(),
        rope: inputs.floats([64, 16]).into_dispatch(),
    };
    let plan = PoolPlan { compression, width, epsilon: 1e-6, entries: 2 };
    let pooled = <Dispatch as SparseOps>::pool_windows(pool, first.clone(), plan);
    outputs.push(read("pool_windows", Tensor::<3>::from_dispatch(pooled)));
    let query = inputs.floats([1, 2, 8, width]);
    let scores = <Dispatch as SparseOps>::score_keys(
        query.clone().into_dispatch(),
        inputs.floats([1, 8, 2]).into_dispatch(),
        entries.clone(),
        coded,
        8,
    );
    let scores = Tensor::<3>::from_dispatch(scores);
    outputs.push(read("score_keys", scores.clone()));
    let selected =
        <Dispatch as SparseOps>::top_entries(scores.into_dispatch(), first.clone(), compression, 1);
    let selected = Tensor::<3, Int>::from_dispatch(selected);
    outputs.push(read_ints("top_entries", selected.clone()));
    for (compression, selects) in
        [(None, false), (Some(compression), false), (Some(compression), true)]
    {
        let attend = AttendInputs {
            query: query.clone().into_dispatch(),
            window: window.clone(),
            entries: entries.clone(),
            selected: selected.clone().into_dispatch(),
            sink_logits: inputs.floats([2]).into_dispatch(),
        };
        let plan = AttendPlan {
            window: plain,
            sliding_window: 6,
            entries: coded,
            compression,
            selects,
            scale: 0.2,
        };
        let output = <Dispatch as SparseOps>::attend_rows(attend, first.clone(), plan);
        outputs.push(read("attend_rows", Tensor::<4>::from_dispatch(output)));
    }
    outputs
}

pub(super) fn delta(device: &Device) -> Vec<Output> {
    let mut inputs = Inputs::new(device, 40);
    let config = DeltaConfig::new(1, 2, Sides { keys: 16, values: 16 }, 4).with_capacity(64);
    let (channels, values) = (config.conv_channels(), config.value_channels());
    let mut outputs = Vec::new();
    for stored in [false, true] {
        let store = DeltaStore {
            conv: inputs.floats([1, 3, channels]).into_dispatch(),
            state: inputs.floats([1, 2, 16, 16]).into_dispatch(),
        };
        let position = match stored {
            false => TokenPosition::Counted,
            true => TokenPosition::Stored(inputs.ints(&[2], [1]).into_dispatch()),
        };
        let tokens = StepInputs {
            mixed: inputs.floats([1, 5, channels + values]).into_dispatch(),
            rates: inputs.floats([1, 5, 4]).into_dispatch(),
            position,
        };
        let weights = StepWeights {
            conv: inputs.floats([channels, 4]).into_dispatch(),
            log_rate: inputs.floats([2]).into_dispatch(),
            time_bias: inputs.floats([2]).into_dispatch(),
            gain: inputs.floats([16]).into_dispatch(),
        };
        let (store, output) =
            <Dispatch as DeltaOps>::delta_step(store, tokens, weights, config, 1e-6);
        outputs.push(read("delta_step", Tensor::<3>::from_dispatch(store.conv)));
        outputs.push(read("delta_step", Tensor::<4>::from_dispatch(store.state)));
        outputs.push(read("delta_step", Tensor::<3>::from_dispatch(output)));
    }
    outputs
}
