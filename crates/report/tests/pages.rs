//! Charts, tables, pages.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;

use kv_report::{
    HeatMap, HtmlReport, Table,
    chart::{Chart, Series, Style},
};

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
    // One empty series among others is allowed.
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
    assert!(svg.contains(" more"), "a legend that does not fit names the rest");
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
        .heat_map(&HeatMap {
            title: hostile.into(),
            corner: hostile.into(),
            columns: vec![hostile.into(), "b".into()],
            rows: vec![hostile.into()],
            cells: vec![vec![Some((0.5, hostile.into())), None]],
        })
        .chart(&Chart { title: hostile.into(), ..chart(vec![line(&[(1.0, 2.0)])]) })
        .unwrap();
    let html = page.html();
    assert!(!html.contains("<script") && !html.contains('\0') && !html.contains("\"y\""));
    assert!(html.matches("&lt;script&gt;").count() >= 13, "{html}");
    assert!(html.contains("<td class=\"number\">1.5</td>"));
    assert!(html.contains("style=\"background:rgb(247,247,247)\">&lt;script"));
    assert!(html.contains("<td class=\"number\">-</td></tr>"));
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
