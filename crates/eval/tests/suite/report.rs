//! Loss by position, error by layer.
use std::path::Path;

use burn::tensor::{Tensor, TensorData};
use kv_cubecl::{Flex, Granularity, KvCacheConfig, KvFormat, On};
use kv_eval::{
    LayerError, Mode, Plan, PositionKl, Run, evaluate, layer_errors,
    layers::{SideError, side_error},
};
use kv_models::{LanguageModel, ModelCacheConfig};

fn model(device: &On<Flex>) -> LanguageModel {
    let path = "../models/tests/golden/models/llama-tiny";
    kv_models::load(Path::new(env!("CARGO_MANIFEST_DIR")).join(path), device).unwrap().model
}

/// Ids without a short period.
fn ids(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i * 31 + i * 7) % 251).collect()
}

fn cache(name: &str) -> KvCacheConfig {
    name.parse().unwrap()
}

#[test]
fn losses_by_position_sum_up_to_the_mean() {
    let device = On::<Flex>::open().unwrap();
    let model = model(&device);
    let caches = ["k2v2-g16-r32-s3", "k2v2-g16-r32-s3-after", "k16v4-g16-r32", "k8v8-g16-r128"];
    for (tokens, window) in [(250, 100), (33, 33), (2, 2), (100, 17)] {
        let configs = caches.map(cache);
        let plan = Plan::new(&model, Mode::Parallel, configs, ids(tokens), window, None).unwrap();
        let runs = evaluate(&device, &model, &plan, |_| ()).unwrap();
        for run in &runs {
            let Run { position_nll, nll, tokens, .. } = run;
            assert_eq!(position_nll.iter().map(|at| at.tokens).sum::<usize>(), *tokens);
            let sum: f64 = position_nll.iter().map(|at| at.nll * at.tokens as f64).sum();
            assert!((sum / *tokens as f64 - nll).abs() < 1e-9 * nll.abs());
            assert_eq!((position_nll[0].start, position_nll.last().unwrap().end), (1, window));
            assert!(position_nll.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(position_nll.iter().all(|at| at.tokens > 0));
            check_divergence(run, window);
        }
        if window == 100 {
            let starts: Vec<_> = runs.iter().map(|run| run.first_quantized).collect();
            assert_eq!(starts, [None, Some(35), Some(36), Some(33), None]);
            // Before quantization starts, a cache has the losses of the float cache.
            assert_eq!(runs[1].position_nll[..2], runs[0].position_nll[..2]);
            assert_ne!(runs[1].position_nll[3], runs[0].position_nll[3]);
        }
    }
}

/// Quantiles are in order, and the parts are the whole window.
#[track_caller]
fn check_divergence(run: &Run, window: usize) {
    let Run { kl_median, kl_p99, kl_p999, position_kl, .. } = run;
    assert!(kl_median <= kl_p99 && kl_p99 <= kl_p999, "{run:?}");
    assert_eq!(position_kl.iter().map(|at| at.tokens).sum::<usize>(), run.tokens);
    assert_eq!((position_kl[0].start, position_kl.last().unwrap().end), (1, window));
    assert!(position_kl.windows(2).all(|pair| pair[0].end == pair[1].start));
    assert!(position_kl.iter().all(|at| at.p99.is_none_or(|p99| at.median <= p99)));
    assert!(position_kl.iter().all(|at| at.p99.is_some() == (at.tokens >= 100)));
    // A cache diverges once it is quantized, and not before.
    let first = run.first_quantized.unwrap_or(usize::MAX);
    let (before, after): (Vec<&PositionKl>, Vec<_>) =
        position_kl.iter().partition(|at| at.end <= first);
    assert!(before.iter().all(|at| at.median == 0.0 && at.p99.is_none_or(|p99| p99 == 0.0)));
    assert!(after.iter().skip(1).all(|at| at.median != 0.0), "{run:?}");
}

#[test]
fn fewer_bits_have_larger_errors_in_every_layer() {
    let device = On::<Flex>::open().unwrap();
    let model = model(&device);
    let errors = |config: ModelCacheConfig| -> Vec<LayerError> {
        let layers = layer_errors(&device, &model, &ids(200), config).unwrap();
        assert_eq!(layers.iter().map(|layer| layer.layer).collect::<Vec<_>>(), [0, 1]);
        layers
    };
    let named = |name: &str| errors(cache(name).into());
    let all = |layer: &LayerError| {
        let LayerError { key_error, value_error, output_error, clipped, constant, .. } = *layer;
        [key_error, value_error, output_error, clipped, constant]
    };
    for layer in named("float").iter().chain(&named("k2v2-g16-r256")) {
        assert_eq!(all(layer), [0.0; 5], "nothing is quantized");
    }
    let [two, four, eight] = ["k2v2-g16-r32", "k4v4-g16-r32", "k8v8-g16-r32"].map(named);
    for ((two, four), eight) in two.iter().zip(&four).zip(&eight) {
        for i in 0..3 {
            let errors = [two, four, eight].map(|layer| all(layer)[i]);
            assert!(errors[0] > 2.0 * errors[1] && errors[1] > 2.0 * errors[2], "{errors:?}");
            assert!(errors[2] > 0.0 && errors[0] < 1.0, "{errors:?}");
        }
        // At most the smallest and the largest element of a group are outside the range of the
        // codes.
        assert!(two.clipped > 0.0 && two.clipped <= 2.5 / 16.0, "{two:?}");
        assert_eq!(two.constant, 0.0);
    }
    let keys_only = named("k2v16-g16-r32")[1];
    assert!(keys_only.key_error > 0.0 && keys_only.value_error == 0.0, "{keys_only:?}");
    let first_in_float = ModelCacheConfig::from(cache("k2v2-g16-r32")).with_float_layers([0]);
    let mixed = errors(first_in_float);
    assert_eq!((all(&mixed[0]), mixed[1]), ([0.0; 5], two[1]));
    assert!(named("float-f16")[0].output_error > 0.0, "f16 rounds");

    layer_errors(&device, &model, &[], cache("k2v2-g16")).unwrap_err();
    layer_errors(&device, &model, &[999], cache("k2v2-g16")).unwrap_err();
    layer_errors(&device, &model, &ids(600), cache("k2v2-g16")).unwrap_err();
    layer_errors(&device, &model, &ids(9), cache("k2v2-g32")).unwrap_err();
}

#[test]
fn constant_and_clipped_elements_are_counted() {
    let device = On::<Flex>::open().unwrap();
    let sides = [Granularity::PerChannel, Granularity::PerToken];
    for granularity in sides {
        let flat = Tensor::<4>::full([1, 2, 32, 16], 0.5, &*device);
        let side = side_error(flat, granularity, KvFormat::Affine2, 16).unwrap();
        let expected = SideError {
            error: 0.0,
            norm: 256.0,
            elements: 1024,
            clipped: 0,
            groups: 64,
            constant: 64,
        };
        assert_eq!(side, expected);
        assert_eq!(side.relative(), 0.0);
    }
    // f16 rounds the ends of one group inwards: min to -0.09998, scale 1/3 to 0.33325. So both ends
    // are beyond codes 0 and 3. The ends of the other group are exact in f16.
    let mut group = vec![0.2f32; 16];
    (group[3], group[9]) = (-0.1, 0.9);
    let exact: Vec<f32> = (0..16).map(|i| (i % 4) as f32).collect();
    let rows = TensorData::new([group, exact].concat(), [1, 1, 2, 16]);
    let per_token = Tensor::<4>::from_data(rows, &*device);
    let per_channel = per_token.clone().swap_dims(2, 3);
    for (input, granularity) in [per_channel, per_token].into_iter().zip(sides) {
        let side = side_error(input, granularity, KvFormat::Affine2, 16).unwrap();
        assert_eq!((side.clipped, side.elements), (2, 32));
        assert_eq!((side.constant, side.groups), (0, 2));
        assert!(side.error > 0.0);
    }
}
