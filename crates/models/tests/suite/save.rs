//! Saved folders are read back unchanged, and a failed save changes no files.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use burn::tensor::{Device, Tensor};
use half::f16;
use kv_models::{
    Error, KV_CACHE_FILE, LanguageModel, LayerSpec, ModelCacheConfig, SaveOptions, Tokenizer,
    WeightDtype, check_savable,
    kv_cubecl::KvCacheConfig,
    llama::{Config, Llama},
    load,
    nn::{RopeScaling, init::seeded},
    save,
};
use safetensors::{Dtype, SafeTensors};
use serde_json::json;

use crate::common::{
    GgmlType, TINY, copy, device, expected, fixture, max_difference, read_tensors, small, smollm2,
    tiny, write_gguf, write_vocabulary,
};

/// Returns a tokenizer with three words; the last ends a text.
pub(crate) fn words() -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let vocab = json!({"a": 0, "b": 1, "<end>": 2});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [{"id": 2, "content": "<end>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"},
    });
    fs::write(&path, tokenizer.to_string()).unwrap();
    Tokenizer::from_file(path, &[2]).unwrap()
}

fn logits(model: &LanguageModel, device: &Device) -> Tensor<3> {
    let seq = model.max_positions().min(160);
    let ids = expected(&tiny("llama-tiny"), device).ids.narrow(1, 0, seq);
    let ids = ids.remainder_scalar(model.vocab_size() as i32);
    model.forward(ids, KvCacheConfig::float()).unwrap()
}

fn tensors(folder: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let tensors = read_tensors(&folder.join("model.safetensors"));
    tensors.into_iter().map(|(name, shape, values)| (name, (shape, values))).collect()
}

fn files(folder: &Path) -> BTreeSet<String> {
    let name = |entry: fs::DirEntry| entry.file_name().into_string().unwrap();
    fs::read_dir(folder).unwrap().map(|entry| name(entry.unwrap())).collect()
}

fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    files(folder).into_iter().map(|n| (n.clone(), fs::read(folder.join(n)).unwrap())).collect()
}

fn config(model: &LanguageModel) -> String {
    let json = model.decoder().config_json(Path::new("config.json")).unwrap();
    format!("{:?} {json:?}", model.spec())
}

#[test]
fn f32_round_trips_exactly() {
    let device = device();
    let more = [fixture("pytorch-tiny")];
    let folders = TINY.map(tiny).into_iter().chain(more);
    for original in folders {
        let saved = tempfile::tempdir().unwrap();
        let loaded = load(&original, &device).unwrap();
        save(saved.path(), &loaded.model, &words(), SaveOptions::default()).unwrap();
        assert_eq!(
            files(saved.path()),
            ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
                .map(String::from)
                .into()
        );
        if original.join("model.safetensors").is_file() {
            assert_eq!(tensors(saved.path()), tensors(&original), "{}", original.display());
        }
        let again = load(saved.path(), &device).unwrap();
        assert_eq!(config(&again.model), config(&loaded.model));
        assert_eq!(again.cache, None);
        let tokenizer = again.tokenizer.unwrap();
        assert_eq!(tokenizer.encode("b <end> a").unwrap(), [1, 2, 0]);
        assert_eq!(tokenizer.eos(), &[2].into());
        let (before, after) = (logits(&loaded.model, &device), logits(&again.model, &device));
        assert_eq!(before.to_data(), after.to_data(), "{}", original.display());
    }
}

#[test]
fn f16_rounds_every_weight_once() {
    let device = device();
    for name in TINY {
        let saved = tempfile::tempdir().unwrap();
        let model = load(tiny(name), &device).unwrap().model;
        let options = SaveOptions { dtype: WeightDtype::F16, ..Default::default() };
        save(saved.path(), &model, &words(), options).unwrap();
        let bytes = fs::read(saved.path().join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for (name, (shape, values)) in tensors(&tiny(name)) {
            let tensor = file.tensor(&name).unwrap();
            assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F16, &shape[..]));
            let expected: Vec<u8> =
                values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect();
            assert!(tensor.data() == expected, "{name}");
        }
        let again = load(saved.path(), &device).unwrap().model;
        let worst = max_difference(logits(&again, &device), logits(&model, &device));
        // With rounded weights, a router picks the other of two experts with nearly equal scores,
        // and rounded rates of decay change the sums over all tokens. The sharp attention of
        // gemma4-tiny amplifies rounding: transformers' logits change by 0.1.
        let most = [
            ("qwen3_moe-tiny", 0.2),
            ("deepseek_v3-tiny", 1.0),
            ("qwen3_5-tiny", 0.02),
            ("gemma4-tiny", 0.2),
            ("gemma4-wide-tiny", 0.02),
        ];
        let most = most.iter().find(|(it, _)| *it == name).map_or(5e-3, |(_, most)| *most);
        assert!(worst > 0.0 && worst < most, "{name}: {worst}");
    }
}

#[test]
fn gguf_files_become_folders() {
    let device = device();
    let folder = tempfile::tempdir().unwrap();
    let gguf = folder.path().join("tiny.gguf");
    for name in ["qwen2", "qwen3_moe", "mixtral", "phi3", "llama", "llama3-rope"] {
        write_gguf(&tiny(&format!("{name}-tiny")), &gguf, GgmlType::Q8_0, &[]);
        let model = load(&gguf, &device).unwrap().model;
        let saved = tempfile::tempdir().unwrap();
        save(saved.path(), &model, &words(), SaveOptions::default()).unwrap();
        let again = load(saved.path(), &device).unwrap().model;
        assert_eq!(logits(&model, &device).to_data(), logits(&again, &device).to_data());
    }
    // llama.cpp writes Llama 3's scaling as divisors, which are recognized.
    let original =
        load(tiny("llama3-rope-tiny"), &device).unwrap().model.downcast::<Llama>().unwrap();
    let converted = load(&gguf, &device).unwrap().model.downcast::<Llama>().unwrap();
    assert!(matches!(original.config().rope_scaling, RopeScaling::Llama3 { .. }));
    assert_eq!(converted.config().rope_scaling, original.config().rope_scaling);

    // The vocabulary has only the 256 bytes, because the tiny models have 256 ids.
    for pre in ["gpt-2", "smollm", "qwen2", "llama-bpe", "default"] {
        write_vocabulary(&gguf, "gpt2", pre, &[]);
        let loaded = load(&gguf, &device).unwrap();
        let saved = tempfile::tempdir().unwrap();
        let tokenizer = loaded.tokenizer.unwrap();
        save(saved.path(), &loaded.model, &tokenizer, SaveOptions::default()).unwrap();
        same_ids(&tokenizer, &load(saved.path(), &device).unwrap().tokenizer.unwrap());
    }
}

fn same_ids(a: &Tokenizer, b: &Tokenizer) {
    let text = fs::read_to_string(fixture("mixed.txt")).unwrap();
    let ids = a.encode(&text).unwrap();
    assert!(ids == b.encode(&text).unwrap());
    assert_eq!(b.decode(&ids).unwrap(), text);
    assert_eq!((a.n_ids(), a.eos()), (b.n_ids(), b.eos()));
}

#[test]
#[ignore = "needs SmolLM2: scripts/get-smollm2 or KV_SMOLLM2"]
fn smollm2_becomes_a_folder() {
    let device = device();
    let loaded = load(smollm2(), &device).unwrap();
    let tokenizer = loaded.tokenizer.unwrap();
    let saved = tempfile::tempdir().unwrap();
    let cache = "k2v2".parse::<ModelCacheConfig>().unwrap().with_float_layers([0, 29]);
    save(
        saved.path(),
        &loaded.model,
        &tokenizer,
        SaveOptions { dtype: WeightDtype::F16, cache: Some(&cache) },
    )
    .unwrap();
    let again = load(saved.path(), &device).unwrap();
    assert_eq!(again.cache, Some(cache));
    same_ids(&tokenizer, &again.tokenizer.unwrap());
    let difference = logits(&loaded.model, &device) - logits(&again.model, &device);
    let mean = difference.abs().mean().into_scalar::<f32>();
    assert!(mean > 0.0 && mean < 0.03, "{mean}");
}

#[test]
fn the_cache_is_loaded_or_rejected() {
    let device = device();
    let folder = copy(&tiny("llama-tiny"));
    let path = folder.path().join(KV_CACHE_FILE);
    let model = load(folder.path(), &device).unwrap().model;
    let cache = |name: &str, float_layers: &[usize]| {
        let cache: ModelCacheConfig = name.parse().unwrap();
        cache.with_float_layers(float_layers.iter().copied())
    };
    let good = cache("k2v2-g16-r32-s4", &[1]);
    fn options(cache: &ModelCacheConfig) -> SaveOptions<'_> {
        SaveOptions { cache: Some(cache), ..Default::default() }
    }
    save(folder.path(), &model, &words(), options(&good)).unwrap();
    assert_eq!(load(folder.path(), &device).unwrap().cache, Some(good.clone()));
    let weights = folder.path().join("model.safetensors");
    assert_eq!(load(weights, &device).unwrap().cache, Some(good.clone()));

    for (bad, parts) in [
        (cache("k2v2-g16", &[2]), ["rules[1].layers = 2", "layers 0 to 1"]),
        (cache("k2v2", &[]), ["group_size", "head_dim 16"]),
    ] {
        bad.write(&path).unwrap();
        let message = load(folder.path(), &device).unwrap_err().to_string();
        assert!(message.contains("kv_cache.json: ") && !message.contains('\n'), "{message}");
        let refused = save(folder.path(), &model, &words(), options(&bad)).unwrap_err();
        for part in parts {
            assert!(message.contains(part), "{message}");
            assert!(refused.to_string().contains(part), "{refused}");
        }
    }
    let text = serde_json::to_string(&good).unwrap();
    for (wrong, parts) in [
        (text.replace("group_size", "groop_size"), "group_size = missing"),
        (text.replace("\"key_format\":2", "\"key_format\":5"), "key_format = 5"),
        (text.replace("{", "{\"extra\":1,"), "extra = 1: unknown field"),
        (text[..text.len() / 2].to_string(), "not a readable json file"),
    ] {
        fs::write(&path, wrong).unwrap();
        let message = load(folder.path(), &device).unwrap_err().to_string();
        assert!(message.contains("kv_cache.json: ") && message.contains(parts), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }

    // A model saved without a cache does not inherit the cache of an earlier model.
    save(folder.path(), &model, &words(), SaveOptions::default()).unwrap();
    assert_eq!(load(folder.path(), &device).unwrap().cache, None);
}

#[test]
fn a_failed_save_changes_no_files() {
    let device = device();
    let model = load(tiny("llama-tiny"), &device).unwrap().model;
    let folder = tempfile::tempdir().unwrap();
    let cache = ModelCacheConfig::from(KvCacheConfig::float());
    let options = SaveOptions { dtype: WeightDtype::F16, cache: Some(&cache) };
    save(folder.path(), &model, &words(), options).unwrap();
    let before = contents(folder.path());
    assert_eq!(before.len(), 5);

    for (value, part) in [
        (1e5, "holds 100000 at element 35, f16 weights must be at most 65504"),
        (f32::NAN, "holds NaN at element 35, weights must be finite"),
        (f32::NEG_INFINITY, "holds -inf at element 35"),
    ] {
        let mut broken = model.clone().downcast::<Llama>().unwrap();
        // Element 35 of the first key row, which follows 96 query rows.
        let weight = broken.layers[1].qkv.weight.val();
        let value = Tensor::full([1, 1], value, &device);
        let weight = weight.slice_assign([96..97, 35..36], value);
        broken.layers[1].qkv.weight = burn::module::Param::from_tensor(weight).into();
        let broken = LanguageModel::new(broken);
        let error = save(folder.path(), &broken, &words(), options).unwrap_err().to_string();
        let name = "model.safetensors: tensor model.layers.1.self_attn.k_proj.weight";
        assert!(error.contains(name) && error.contains(part), "{error}");
        assert!(before == contents(folder.path()), "{:?}", files(folder.path()));
    }

    // A vocabulary larger than the model's.
    let tokenizer = Tokenizer::train_bpe(["a"].into_iter(), 257).unwrap();
    let error = save(folder.path(), &model, &tokenizer, options).unwrap_err();
    assert!(error.to_string().contains("has 257 ids, but the model has 256"), "{error}");
    assert!(before == contents(folder.path()));

    // A folder takes the place of the weights and cannot be replaced.
    let weights = folder.path().join("model.safetensors");
    fs::remove_file(&weights).unwrap();
    fs::create_dir(&weights).unwrap();
    let error = save(folder.path(), &model, &words(), SaveOptions::default()).unwrap_err();
    assert!(matches!(&error, Error::Write { path, .. } if *path == weights), "{error}");
    fs::remove_dir(&weights).unwrap();
    let left = contents(folder.path());
    assert_eq!(left.len(), 4);
    assert!(left.iter().all(|(name, bytes)| before[name] == *bytes));

    // Not a folder.
    let file = folder.path().join("config.json").join("model");
    let error = save(&file, &model, &words(), options).unwrap_err().to_string();
    assert!(error.contains("config.json/model: cannot write: "), "{error}");
}

#[cfg(unix)]
#[test]
fn weights_are_as_readable_as_other_files() {
    use std::os::unix::fs::MetadataExt;

    let folder = tempfile::tempdir().unwrap();
    let model = load(tiny("llama-tiny"), &device()).unwrap().model;
    save(folder.path(), &model, &words(), SaveOptions::default()).unwrap();
    let mode = |name: &str| fs::metadata(folder.path().join(name)).unwrap().mode();
    assert_eq!(mode("model.safetensors"), mode("config.json"));
}

#[test]
fn every_configuration_is_saved_or_rejected() {
    let device = device();
    let bools = [false, true];
    let mut n_saved = 0;
    for (qkv_bias, output_bias, mlp_bias) in bools
        .iter()
        .flat_map(|&q| bools.map(|o| (q, o)))
        .flat_map(|(q, o)| bools.map(|m| (q, o, m)))
    {
        for (rotary_dim, rope_scaling) in [
            (16, RopeScaling::Default),
            (10, RopeScaling::Default),
            (16, RopeScaling::Linear { factor: 2.5 }),
            (10, RopeScaling::Linear { factor: 2.5 }),
            (16, RopeScaling::Divisors(vec![1.0, 1.1, 1.7, 3.0, 4.0, 0.3, 8.0, 1e-3])),
        ] {
            let config =
                Config { qkv_bias, output_bias, mlp_bias, rotary_dim, rope_scaling, ..small() };
            let model =
                LanguageModel::new(seeded(&device, 9, || Llama::init(config.clone(), &device)));
            let folder = tempfile::tempdir().unwrap();
            let savable = check_savable(&model, &words(), SaveOptions::default());
            match save(folder.path(), &model, &words(), SaveOptions::default()) {
                Ok(()) => {
                    savable.unwrap();
                    n_saved += 1;
                    let again = load(folder.path(), &device).unwrap().model;
                    let llama = again.downcast_ref::<Llama>().unwrap();
                    assert_eq!(llama.config(), &config);
                    assert_eq!(
                        logits(&again, &device).to_data(),
                        logits(&model, &device).to_data()
                    );
                }
                Err(error) => {
                    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
                    assert!(error.to_string().contains("config.json"), "{error}");
                    assert!(matches!(savable, Err(Error::Unsupported { .. })), "{savable:?}");
                    assert!(files(folder.path()).is_empty());
                }
            }
        }
    }
    // Llama with no or all attention biases, each with or without biases of the MLP, and Qwen2,
    // each with three kinds of rope. Phi-3.
    assert_eq!(n_saved, 5 * 3 + 1);
}

#[test]
fn context_dependent_frequencies_are_saved() {
    let device = device();
    for rotary_dim in [16, 10] {
        let factors = |x: f32| (0..rotary_dim / 2).map(|i| 1.0 + x * i as f32).collect();
        let config = Config {
            rotary_dim,
            rope_scaling: RopeScaling::LongRope {
                short_factors: factors(0.1),
                long_factors: factors(0.7),
                original_max_positions: 100,
                attention_factor: 1.19,
            },
            ..small()
        };
        let model = LanguageModel::new(seeded(&device, 9, || Llama::init(config.clone(), &device)));
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), &model, &words(), SaveOptions::default()).unwrap();
        let again = load(folder.path(), &device).unwrap().model;
        let llama = again.downcast::<Llama>().unwrap();
        assert_eq!(llama.config(), &config);
    }
}

#[test]
fn partial_rope_survives_rounding() {
    let device = device();
    for head_dim in [24, 80, 96, 112] {
        for rotary_dim in (2..head_dim).step_by(2) {
            let attention = LayerSpec::new(1, 1, head_dim);
            let config = Config {
                attention,
                hidden_size: head_dim,
                intermediate_size: 2,
                vocab_size: 3,
                n_layers: 1,
                rotary_dim,
                ..small()
            };
            let folder = tempfile::tempdir().unwrap();
            let model =
                LanguageModel::new(seeded(&device, 9, || Llama::init(config.clone(), &device)));
            save(folder.path(), &model, &words(), SaveOptions::default()).unwrap();
            let again = load(folder.path(), &device).unwrap().model.downcast::<Llama>().unwrap();
            assert_eq!(again.config(), &config);
        }
    }
}

#[test]
fn a_trained_vocabulary_is_saved() {
    let text = fs::read_to_string(fixture("mixed.txt")).unwrap();
    let train = |n| Tokenizer::train_bpe(text.lines(), n);
    for n in [257, 300, 1000] {
        let tokenizer = train(n).unwrap();
        assert_eq!(tokenizer.n_ids(), n);
        assert_eq!(tokenizer.eos(), &[0].into());
        assert_eq!(tokenizer.token_to_id("<|endoftext|>"), Some(0));
        assert_eq!(tokenizer.id_to_token(0).as_deref(), Some("<|endoftext|>"));
        let ids = tokenizer.encode(&text).unwrap();
        assert!(ids.iter().all(|&id| id != 0 && (id as usize) < n));
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        assert_eq!(tokenizer.encode("<|endoftext|>a").unwrap().len(), 2);
        let emoji = "naïve 🦀 日本語 \u{0} \r\n";
        assert_eq!(tokenizer.decode(&tokenizer.encode(emoji).unwrap()).unwrap(), emoji);

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        tokenizer.save(&path).unwrap();
        let again = Tokenizer::from_file(&path, &[0]).unwrap();
        same_ids(&tokenizer, &again);
        let bytes = fs::read(&path).unwrap();
        train(n).unwrap().save(&path).unwrap();
        assert!(fs::read(&path).unwrap() == bytes, "training repeats");
    }
    for (n, part) in [(256, "must be at least 257"), (10_000_000, "the texts give only ")] {
        let error = train(n).unwrap_err().to_string();
        assert!(error.contains(&format!("vocab_size = {n}: ")) && error.contains(part), "{error}");
    }
    let empty = Tokenizer::train_bpe(std::iter::empty::<String>(), 257).unwrap();
    assert_eq!(empty.encode("ab").unwrap().len(), 2);
    let missing = fixture("no-such-folder").join("tokenizer.json");
    let error = empty.save(&missing).unwrap_err();
    assert!(matches!(&error, Error::Write { path, .. } if *path == missing), "{error}");
}

#[cfg(feature = "autodiff")]
#[test]
fn a_model_in_training_is_saved() {
    use burn::tensor::Tolerance;

    let training = device().autodiff();
    let folder = tempfile::tempdir().unwrap();
    let model = LanguageModel::new(seeded(&training, 9, || Llama::init(small(), &training)));
    save(folder.path(), &model, &words(), SaveOptions::default()).unwrap();
    let again = load(folder.path(), &device()).unwrap().model;
    // With gradients, other operations compute the same values.
    let [again, trained] = [logits(&again, &device()), logits(&model, &training)];
    again.to_data().assert_approx_eq(&trained.to_data(), Tolerance::<f32>::absolute(1e-5));
}
