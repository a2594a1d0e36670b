//! Training and serving compute the same results: the parallel pass of a prepared model is compared
//! with the converted model, which streams token by token through the cache.
#![allow(clippy::print_stdout, reason = "how close is seen with --nocapture")]

use burn::tensor::{Device, Int, Tensor, TensorData, activation::log_softmax};
use kv_models::{
    AttentionTrace, KvTrace, LanguageModel, LayerSpec, LoadOptions, ModelCache, WeightDtype,
    kv_cubecl::{
        Autodiff, Flex, KvCache, KvCacheConfig, KvFormat, Logical, On, Packed, Side,
        layout::QuantSpec, quantize_side,
    },
    llama::{Config, Llama},
    load_with,
    nn::{Matrix, RopeScaling, init::seeded},
};
use kv_train::{QatConfig, prepare};

const TOKENS: usize = 275;
const VOCAB: usize = 97;

/// Two layers of four query heads and `n_kv_heads` key and value heads of 64 channels.
fn model(n_kv_heads: usize, device: &Device) -> LanguageModel {
    let config = Config {
        vocab_size: VOCAB,
        hidden_size: 192,
        intermediate_size: 256,
        n_layers: 2,
        attention: LayerSpec::new(4, n_kv_heads, 64),
        max_positions: 512,
        norm_epsilon: 1e-5,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        tied_head: true,
        rotary_dim: 64,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        full_layers: Default::default(),
        layers_without_rope: Default::default(),
        qk_norms: false,
    };
    let mut llama = seeded(device, 11, || Llama::init(config, device));
    // As in a trained model, scores and logits differ by several nats, and each layer adds little
    // to the residual stream.
    let scale = |matrix: &mut Matrix, times: f32| {
        *matrix = matrix.clone().map_tensor(|tensor| tensor.mul_scalar(times));
    };
    scale(&mut llama.embedding.weight, 4.0);
    for layer in &mut llama.layers {
        scale(&mut layer.qkv.weight, 1.1);
        for linear in [&mut layer.output, &mut layer.mlp.gate_up, &mut layer.mlp.down] {
            scale(&mut linear.weight, 0.28);
        }
    }
    LanguageModel::new(llama)
}

fn ids(device: &Device) -> Tensor<2, Int> {
    // A Weyl sequence has no period within the text.
    let ids = (0..TOKENS as u64).map(|i| (((i * 0x9e37_79b9) >> 7) % VOCAB as u64) as i32);
    Tensor::from_data(TensorData::new(ids.collect(), [1, TOKENS]), device)
}

fn host<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec::<f32>().unwrap()
}

/// Returns the largest difference, divided by the largest magnitude of `expected`.
fn distance(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let difference = got.iter().zip(expected).map(|(a, b)| (a - b).abs());
    difference.fold(0.0, f32::max) / largest
}

/// Returns the mean negative log-likelihood of the next tokens.
fn nll(logits: &Tensor<3>, ids: &Tensor<2, Int>) -> f64 {
    let log_p = log_softmax(logits.clone().narrow(1, 0, TOKENS - 1), 2);
    let next = ids.clone().narrow(1, 1, TOKENS - 1).unsqueeze_dim::<3>(2);
    -log_p.gather(2, next).mean().into_scalar::<f64>()
}

/// Returns all codes, group by group.
fn codes(packed: &Logical, spec: QuantSpec, head_dim: usize) -> Vec<u32> {
    let group = |nth: usize| {
        let (first, stride) = spec.logical_words(nth, head_dim);
        let code = move |at| spec.code(at, |word| packed.codes[first + word * stride]);
        (0..spec.group_size).map(code)
    };
    (0..packed.scale.len()).flat_map(group).collect()
}

/// The differences between the parallel pass and streaming.
#[derive(Default)]
struct Difference {
    /// Number of codes, number of different ones, and the largest difference in steps.
    codes: usize,
    differing: usize,
    steps: u32,
    /// Number of scales and minima, and number of different ones.
    params: usize,
    differing_params: usize,
    nll: f64,
    /// Largest difference of the logits, divided by the largest logit.
    logits: f32,
}

/// Compares the codes of one side of one layer with the codes that the parallel pass would store.
fn compare(
    of: Side,
    side: Tensor<4>,
    packed: Option<Packed>,
    config: &KvCacheConfig,
    all: &mut Difference,
) {
    let Some(packed) = packed else { return };
    let spec = packed.spec();
    let [_, _, count, head_dim] = packed.shape();
    let values = side.narrow(2, config.sink_tokens, count);
    let parallel = quantize_side(values, of, config).unwrap();
    let (parallel, streamed) = (parallel.to_logical(), packed.to_logical());
    for (a, b) in [(&parallel.scale, &streamed.scale), (&parallel.min, &streamed.min)] {
        assert_eq!(a.len(), b.len());
        all.differing_params += a.iter().zip(b).filter(|(a, b)| a != b).count();
        all.params += a.len();
    }
    let (parallel, streamed) = (codes(&parallel, spec, head_dim), codes(&streamed, spec, head_dim));
    assert_eq!(parallel.len(), streamed.len());
    for (a, b) in parallel.iter().zip(&streamed) {
        all.differing += usize::from(a != b);
        all.steps = all.steps.max(a.abs_diff(*b));
    }
    all.codes += parallel.len();
}

/// Compares the parallel pass with streaming for one cache. Also compares the attention of the
/// parallel pass with a cache that gets the same keys and values.
fn align(model: &LanguageModel, name: &str, device: &On<Autodiff<Flex>>) -> Difference {
    let config: KvCacheConfig = name.parse().unwrap();
    let config = config.with_capacity(TOKENS);
    let prepared = prepare(model.clone(), QatConfig::new(config)).unwrap();
    let text = ids(device);

    let mut traces: Vec<AttentionTrace> = Vec::new();
    let mut observe = |trace| traces.push(trace);
    let QatConfig { cache, fake_quant, .. } = prepared.config().clone();
    let hidden = prepared.model.hidden_with(text.clone(), &cache, fake_quant, Some(&mut observe));
    let parallel = prepared.model.head(hidden.unwrap());
    let forward = prepared.forward(text.clone()).unwrap();
    // The same computation twice gives the same bits.
    assert_eq!(host(forward), host(parallel.clone()), "{name}");

    let converted = prepared.convert();
    let plain = (**device).clone().without_autodiff();
    let mut cache: ModelCache = converted.model.new_cache(&converted.cache, 1, &plain).unwrap();
    let text = text.without_autodiff();
    let rows: Vec<Tensor<3>> = (0..TOKENS)
        .map(|t| converted.model.step(text.clone().narrow(1, t, 1), &mut cache).unwrap())
        .collect();
    let streamed = Tensor::cat(rows, 1);

    let mut all = Difference::default();
    for (trace, streamed) in traces.into_iter().zip(cache.layers()) {
        let streamed = streamed.kv().unwrap();
        let (layer, KvTrace { query, key, value, output, .. }) =
            (trace.layer, trace.kv().unwrap().clone());
        let [query, key, value, output] =
            [query, key, value, output].map(|tensor| tensor.without_autodiff());
        compare(Side::Keys, key.clone(), streamed.packed(Side::Keys), &config, &mut all);
        compare(Side::Values, value.clone(), streamed.packed(Side::Values), &config, &mut all);

        let shape = streamed.layout().shape();
        let mut alone = KvCache::new(&config, shape, &plain).unwrap();
        let rows: Vec<Tensor<4>> = (0..TOKENS)
            .map(|t| {
                let row = |tensor: &Tensor<4>| tensor.clone().narrow(2, t, 1);
                alone.attend(row(&query), row(&key), row(&value)).unwrap().output
            })
            .collect();
        let far = distance(&host(Tensor::cat(rows, 2)), &host(output));
        // Both sides have the same codes and differ only in the order of f32 sums.
        assert!(far < 1e-5, "{name}: attention of layer {layer} differs by {far}");
    }
    let counts = cache.layers()[0].kv().unwrap().quantized_counts();
    assert_eq!(counts.keys > 0, config.keys.is_quantized(), "{name}");
    assert_eq!(counts.values > 0, config.values.is_quantized(), "{name}");

    let parallel = parallel.without_autodiff();
    all.nll = (nll(&parallel, &text) - nll(&streamed, &text)).abs();
    all.logits = distance(&host(streamed), &host(parallel));
    all
}

/// Checks one cache, and returns whether all codes were equal.
#[track_caller]
fn check(model: &LanguageModel, name: &str, device: &On<Autodiff<Flex>>) -> bool {
    let config: KvCacheConfig = name.parse().unwrap();
    let difference = align(model, name, device);
    let Difference { codes, differing, steps, params, differing_params, nll, logits } = difference;
    println!(
        "{name} kv heads {}: {differing} of {codes} codes, {steps} step(s), {differing_params} of \
         {params} parameters, logits {logits:.1e}, nll {nll:.1e}",
        model.spec().layers[0].n_kv_heads
    );
    // Float noise decides the rounding of a code that lies between two values, which changes the
    // input of later layers.
    assert!(differing as f64 <= 1e-3 * codes as f64, "{name}: {differing} of {codes} codes differ");
    assert!(steps <= 1, "{name}: a code differs by {steps}");
    if differing == 0 {
        // The remaining difference comes from the order of f32 sums in two layers, and from scales
        // and minima that lie between two f16 values.
        assert!(logits < 1e-4, "{name}: logits differ by {logits}");
    }
    // One step of a 2-bit code is a third of its group's range.
    let coarse = [config.keys, config.values].contains(&KvFormat::Affine2);
    let bound = if coarse { 1e-2 } else { 1e-3 };
    assert!(nll < bound, "{name}: mean negative log-likelihood differs by {nll}");
    differing == 0
}

fn check_all(n_kv_heads: usize, names: &[&str]) {
    let device = On::<Autodiff<Flex>>::open().unwrap();
    let model = model(n_kv_heads, &device);
    let equal = names.iter().filter(|name| check(&model, name, &device)).count();
    // At least one cache must have passed the bound on logits.
    assert!(equal > 0, "codes differ with each of {names:?}");
}

#[test]
fn attention_is_not_uniform() {
    let device = On::<Autodiff<Flex>>::open().unwrap();
    let model = model(2, &device);
    let mut largest = Vec::new();
    let mut observe = |trace: AttentionTrace| {
        let KvTrace { query, key, .. } = trace.kv().unwrap().clone();
        let last = query.narrow(2, TOKENS - 1, 1).narrow(1, 0, 2);
        let key = key.narrow(1, 0, 1).repeat_dim(1, 2);
        let scores = last.matmul(key.swap_dims(2, 3)).mul_scalar(1.0 / 8.0);
        let p = burn::tensor::activation::softmax(scores, 3);
        largest.push(p.max().into_scalar::<f32>() * TOKENS as f32);
    };
    let cache = KvCacheConfig::float().into();
    let text = ids(&device);
    model.hidden_with(text, &cache, Default::default(), Some(&mut observe)).unwrap();
    assert!(largest.iter().all(|&times| times > 5.0), "times uniform: {largest:?}");
}

#[test]
fn grouped_queries_flush_before() {
    check_all(
        2,
        &[
            "k2v2-g16-r32",
            "k4v2-g32-r32",
            "k2v4-g64-r128",
            "k8v8-g64-r128",
            "k4v4-g32-r128",
            "k2v2-g32-r128-s4",
            "k2v2-g16-r128",
            "k8v8-g16-r32-s3",
        ],
    );
}

#[test]
fn grouped_queries_flush_after() {
    check_all(
        2,
        &[
            "k2v2-g16-r32-after",
            "k4v2-g16-r128-s4-after",
            "k2v4-g32-r32-after",
            "k8v8-g32-r128-after",
            "k2v2-g64-r128-after",
            "k4v4-g16-r32-s1-after",
        ],
    );
}

#[test]
fn as_many_key_heads_as_query_heads() {
    check_all(4, &["k2v2-g32-r128", "k4v4-g64-r128-after", "k8v8-g16-r32"]);
}

#[test]
fn one_key_head_and_one_side_in_float() {
    check_all(1, &["k2v2-g32-r32", "k2v16-g32-r128", "k16v2-g64-r32-after", "k4v2-g16-r32-s5"]);
}

/// Small updates would be lost in the rounding to 16 bits.
#[test]
fn weights_in_16_bits_are_not_trained() {
    let device = On::<Flex>::open().unwrap();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/golden/models/llama-tiny");
    for dtype in [WeightDtype::F16, WeightDtype::Bf16] {
        let options = LoadOptions::default().with_dtype(dtype);
        let model = load_with(folder, &device, options).unwrap().model;
        let error = prepare(model, QatConfig::new(KvCacheConfig::float())).unwrap_err();
        let output = format!("dtype {dtype}: must be f32 to train; load the model as f32");
        assert_eq!(error.to_string(), output);
    }
}
