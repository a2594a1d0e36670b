//! Charts, pages, loss by position, error by layer.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;

use burn::tensor::{Tensor, TensorData};
use kv_cubecl::{Bits, Flex, Granularity, KvCacheConfig, On};
use kv_eval::{
    HtmlReport, LayerError, Mode, Plan, Run, Table,
    chart::{Chart, Series, Style},
    evaluate, layer_errors,
    layers::{SideError, side_error},
};
use kv_models::{LanguageModel, ModelCacheConfig};

/// Tags are balanced, attributes quoted, and every `&` starts an entity.
#[track_caller]
fn assert_well_formed(xml: &str) {
    let mut open = Vec::new();
    let mut rest = xml;
    while let Some((text, tail)) = rest.split_once('<') {
        assert!(!text.contains('>'), "{text:?}");
        assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
        for entity in text.split('&').skip(1) {
            let known = ["amp;", "lt;", "gt;", "quot;", "apos;"];
            assert!(known.iter().any(|name| entity.starts_with(name)), "&{entity}");
        }
        let (tag, tail) = tail.split_once('>').unwrap();
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag:?}");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
        } else if !tag.ends_with('/') {
            open.push(tag.split_whitespace().next().unwrap());
        }
        rest = tail;
    }
    assert!(open.is_empty(), "{open:?}");
}

fn chart(series: Vec<Series>) -> Chart {
    let texts = ["Title <1>", "step", "loss & more"].map(String::from);
    let [title, x_label, y_label] = texts;
    Chart { title, x_label, y_label, series, ..Chart::default() }
}

fn line(points: &[(f64, f64)]) -> Series {
    Series::new("a line", points.to_vec(), Style::Line)
}

/// Width and height of a PNG file, from its header.
fn png_size(path: &Path) -> (u32, u32) {
    let bytes = std::fs::read(path).unwrap();
    assert!(bytes.starts_with(b"\x89PNG\r\n\x1a\n") && bytes.ends_with(b"IEND\xaeB`\x82"));
    let number = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
    (number(16), number(20))
}

#[test]
fn charts_hold_their_texts_in_well_formed_svg() {
    let styles = [Style::Line, Style::LinePoints, Style::Points];
    let mut all: Vec<Series> = (0..9)
        .map(|i| {
            let points = (0..20).map(|x| (f64::from(x), f64::from((x * i) % 7) + 1.0)).collect();
            Series::new(format!("series <{i}> & \"co\"\u{7}"), points, styles[i as usize % 3])
        })
        .collect();
    all.push(Series::new("lonely", vec![(3.0, 4.0)], Style::Points));
    let mut chart = chart(all);
    chart.vertical_marks = vec![(8.0, "mark".into()), (99.0, "beyond".into())];
    for (log_x, log_y) in [(false, false), (false, true)] {
        let svg = Chart { log_x, log_y, ..chart.clone() }.svg().unwrap();
        assert_well_formed(&svg);
        let texts = ["Title &lt;1&gt;", "loss &amp; more", "lonely", "mark"];
        for text in texts.into_iter().chain(["series &lt;8&gt; &amp; &quot;co&quot;"]) {
            assert!(svg.contains(text), "{text}");
        }
        assert!(!svg.contains("beyond"));
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chart.png");
    chart.write_png(&path).unwrap();
    assert_eq!(png_size(&path), (1350, 780));
    let error = chart.write_png(folder.path().join("no/chart.png")).unwrap_err().to_string();
    assert!(error.contains("no/chart.png") && error.contains("cannot write"), "{error}");
    chart.write_png(folder.path().join("chart.bmp")).unwrap_err();
}

#[test]
fn odd_data_is_drawn_or_refused_but_does_not_panic() {
    let fine: [&[(f64, f64)]; 7] = [
        &[(1.0, 2.0)],
        &[(1.0, 2.0), (1.0, 2.0)],
        &[(0.0, 0.0), (5.0, 0.0)],
        &[(3.0, -1e300), (3.0, 1e300)],
        &[(1e16, 1e-300), (1e16 + 2.0, 2e-300)],
        &[(1.0, 1e9), (2.0, 1e9 + 1e-3)],
        &[(-5.0, 7.0), (-6.0, 9.0)],
    ];
    for points in fine {
        assert_well_formed(&chart(vec![line(points)]).svg().unwrap());
    }
    // One empty series among others.
    chart(vec![line(&[]), line(&[(1.0, 1.0)])]).svg().unwrap();

    let refused = |chart: Chart, part: &str| {
        let error = chart.svg().unwrap_err().to_string();
        assert!(error.contains("Title <1>") && error.contains(part), "{error}");
        let path = tempfile::tempdir().unwrap().path().join("chart.png");
        chart.write_png(&path).unwrap_err();
        assert!(!path.exists());
    };
    refused(chart(vec![]), "no points");
    refused(chart(vec![line(&[])]), "no points");
    refused(
        chart(vec![line(&[(0.0, 1.0), (1.0, f64::NAN)])]),
        "y of point 1 of series a line: NaN",
    );
    refused(chart(vec![line(&[(f64::INFINITY, 1.0)])]), "x of point 0 of series a line: inf");
    refused(Chart { log_y: true, ..chart(vec![line(&[(1.0, 0.0)])]) }, "not above 0");

    let long = Series::new("long name ".repeat(50), vec![(1.0, 2.0)], Style::Points);
    let crowd = (0..60).map(|_| line(&[(1.0, 2.0), (2.0, 3.0)])).chain([long]).collect();
    let mut crowded = chart(crowd);
    crowded.title = "very long title ".repeat(40);
    let svg = crowded.svg().unwrap();
    assert!(svg.contains(" more"), "a legend that does not fit says so");
}

#[test]
fn pages_escape_every_text() {
    let hostile = "<script>alert('x')</script> & \"y\"\u{0}";
    let mut table = Table::new([hostile, "n"]);
    table.push([hostile, "1.5"]);
    table.push(["short"]);
    let page = HtmlReport::new(hostile)
        .heading(hostile)
        .paragraph(hostile)
        .pre(hostile)
        .table(&table)
        .chart(&Chart { title: hostile.into(), ..chart(vec![line(&[(1.0, 2.0)])]) })
        .unwrap();
    let html = page.html();
    assert!(!html.contains("<script") && !html.contains('\0') && !html.contains("\"y\""));
    assert!(html.matches("&lt;script&gt;").count() >= 8, "{html}");
    assert!(html.contains("<td class=\"number\">1.5</td>"));
    assert!(html.contains("<td>short</td><td class=\"number\"></td>"));
    let folder = tempfile::tempdir().unwrap();
    page.write(folder.path().join("page.html")).unwrap();
    assert_eq!(std::fs::read_to_string(folder.path().join("page.html")).unwrap(), html);
    page.write(folder.path()).unwrap_err();
}

#[test]
fn tables_align_numbers() {
    let mut table = Table::new(["name", "share"]);
    table.push(["a", "5.0%"]);
    table.push(["longer", "100.0%"]);
    table.push(["cut", "1.0%", "beyond the header"]);
    assert_eq!(
        table.to_string(),
        "name     share\na         5.0%\nlonger  100.0%\ncut       1.0%\n"
    );
}

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
        }
        if window == 100 {
            let starts: Vec<_> = runs.iter().map(|run| run.first_quantized).collect();
            assert_eq!(starts, [None, Some(35), Some(36), Some(33), None]);
            // Before quantizing starts a cache is the float cache.
            assert_eq!(runs[1].position_nll[..2], runs[0].position_nll[..2]);
            assert_ne!(runs[1].position_nll[3], runs[0].position_nll[3]);
        }
    }
}

#[test]
fn fewer_bits_err_more_in_every_layer() {
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
        // Of a group at most its ends are beyond the codes.
        assert!(two.clipped > 0.0 && two.clipped <= 2.5 / 16.0, "{two:?}");
        assert_eq!(two.constant, 0.0);
    }
    let keys_only = named("k2v16-g16-r32")[1];
    assert!(keys_only.key_error > 0.0 && keys_only.value_error == 0.0, "{keys_only:?}");
    let first_in_float =
        ModelCacheConfig { cache: cache("k2v2-g16-r32"), float_layers: [0].into() };
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
        let side = side_error(flat, granularity, Bits::Two, 16).unwrap();
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
    // One group whose ends f16 rounds inwards: min to -0.09998, scale 1/3 to 0.33325, so that both
    // ends are beyond codes 0 and 3; and one whose ends it represents exactly.
    let mut group = vec![0.2f32; 16];
    (group[3], group[9]) = (-0.1, 0.9);
    let exact: Vec<f32> = (0..16).map(|i| (i % 4) as f32).collect();
    let rows = TensorData::new([group, exact].concat(), [1, 1, 2, 16]);
    let per_token = Tensor::<4>::from_data(rows, &*device);
    let per_channel = per_token.clone().swap_dims(2, 3);
    for (input, granularity) in [per_channel, per_token].into_iter().zip(sides) {
        let side = side_error(input, granularity, Bits::Two, 16).unwrap();
        assert_eq!((side.clipped, side.elements), (2, 32));
        assert_eq!((side.constant, side.groups), (0, 2));
        assert!(side.error > 0.0);
    }
}
