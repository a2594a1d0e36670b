//! Draws a [`Chart`] with `plotters`. The legend has a separate area, so it covers nothing.

use std::sync::OnceLock;

use plotters::{
    coord::{Shift, ranged1d::ValueFormatter},
    element::{DashedPathElement, Drawable, PointCollection},
    prelude::*,
    style::register_font,
};

use super::{
    Chart, Style,
    axis::{Axis, check},
};

/// Okabe and Ito's palette without its yellow, which is faint on white.
const PALETTE: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(0, 0, 0),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
];
/// Lengths of dash and gap; none for a solid line.
const DASHES: [Option<(f64, f64)>; 4] =
    [None, Some((9.0, 4.0)), Some((3.0, 3.0)), Some((15.0, 6.0))];
const TEXT: RGBColor = RGBColor(40, 40, 40);
const GRID: RGBColor = RGBColor(225, 225, 225);
const MARK: RGBColor = RGBColor(110, 110, 110);

/// The font family that the embedded font is registered as. An SVG names only this family, and its
/// viewer chooses the font.
const FAMILY: &str = "sans-serif";
const SIZE: f64 = 15.0;
/// Length of a series' sample in the legend.
const SAMPLE: f64 = 30.0;
/// The number of legend entries there is room for.
const ENTRIES: usize = 18;

type Point = (i32, i32);
type Outcome<T = ()> = Result<T, String>;

#[derive(Clone, Copy)]
struct Scale(f64);

impl Scale {
    fn px(self, length: f64) -> i32 {
        (length * self.0).round() as i32
    }

    fn font(self, size: f64) -> TextStyle<'static> {
        (FAMILY, size * self.0).into_font().color(&TEXT)
    }
}

/// Draws `chart` with every length multiplied by `scale`.
pub(super) fn draw<DB: DrawingBackend>(chart: &Chart, backend: DB, scale: f64) -> Outcome {
    static FONT: OnceLock<bool> = OnceLock::new();
    let font = epaint_default_fonts::UBUNTU_LIGHT;
    if !FONT.get_or_init(|| register_font(FAMILY, FontStyle::Normal, font).is_ok()) {
        return Err("the embedded font cannot be read".to_string());
    }
    let scale = Scale(scale);
    let font = scale.font(SIZE);
    // In a chart of points alone, wider margins keep them off the edges.
    let points = chart.series.iter().all(|series| series.style == Style::Points);
    let margins = if points { (0.08, 0.08) } else { (0.02, 0.06) };
    let x = axis(chart, "x", chart.log_x, margins.0, |point| point.0)?;
    let y = axis(chart, "y", chart.log_y, margins.1, |point| point.1)?;

    let whole = backend.into_drawing_area();
    whole.fill(&WHITE).map_err(text_of)?;
    let ticks = y.ticks().iter().map(|tick| y.format_ext(tick)).collect::<Vec<_>>();
    let ticks_width = widest(&whole, &ticks, &font)?;
    let marks: Vec<&(f64, String)> =
        chart.vertical_marks.iter().filter(|(value, _)| x.holds(*value)).collect();
    let looks = looks(chart, &marks, scale);
    let entries = legend_entries(&looks);
    let names: Vec<String> = entries.iter().map(|(name, _)| name.clone()).collect();
    let legend_width = widest(&whole, &names, &font)? + scale.px(SAMPLE + 30.0);
    let (left, right) = whole.split_horizontally(whole.dim_in_pixel().0 as i32 - legend_width);

    let mut plot = ChartBuilder::on(&left);
    plot.caption(short(&chart.title, 70), scale.font(20.0)).margin(scale.px(10.0));
    plot.x_label_area_size(scale.px(46.0)).y_label_area_size(ticks_width + scale.px(36.0));
    let mut plot = plot.build_cartesian_2d(x, y).map_err(text_of)?;
    plot.configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(TEXT)
        .label_style(font.clone())
        .axis_desc_style(font)
        .x_desc(short(&chart.x_label, 60))
        .y_desc(short(&chart.y_label, 50))
        .draw()
        .map_err(text_of)?;
    let rows = plot.plotting_area().get_pixel_range().1;
    let lines = chart.series.iter().map(|series| series.points.iter());
    let lines = lines.map(|points| points.map(|point| plot.backend_coord(point)).collect());
    let marks = marks.iter().map(|(value, _)| {
        let (column, _) = plot.backend_coord(&(*value, chart.series[0].points[0].1));
        vec![(column, rows.start), (column, rows.end)]
    });
    for (points, (_, look)) in lines.chain(marks).zip(&looks) {
        whole.draw(&look.through(points)).map_err(text_of)?;
    }

    draw_legend(&right, entries, scale)?;
    whole.present().map_err(text_of)
}

/// Returns the name and the look of each series, then of each vertical mark.
fn looks(chart: &Chart, marks: &[&(f64, String)], scale: Scale) -> Vec<(String, Look)> {
    let series = chart.series.iter().enumerate();
    series
        .map(|(i, series)| (short(&series.name, 32), Look::of(i, series.style, scale)))
        .chain(marks.iter().map(|(_, name)| (short(name, 32), Look::of_mark(scale))))
        .collect()
}

/// Returns the entries that the legend has room for; the last tells how many are left out.
fn legend_entries(looks: &[(String, Look)]) -> Vec<(String, Look)> {
    if looks.len() <= ENTRIES {
        return looks.to_vec();
    }
    let (shown, hidden) = looks.split_at(ENTRIES - 1);
    [shown, &[(format!("and {} more", hidden.len()), Look::default())]].concat()
}

/// Draws a plot without axes, for its legend.
fn draw_legend<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    entries: Vec<(String, Look)>,
    scale: Scale,
) -> Outcome {
    let mut legend = ChartBuilder::on(area);
    let legend = legend.margin_top(scale.px(40.0));
    let mut legend = legend.build_cartesian_2d(0..1, 0..1).map_err(text_of)?;
    for (name, look) in entries {
        let nothing: [Circle<(i32, i32), i32>; 0] = [];
        let series = legend.draw_series(nothing).map_err(text_of)?.label(name);
        series.legend(move |at| look.sample(at, scale.px(SAMPLE)));
    }
    legend
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .legend_area_size(scale.px(SAMPLE + 10.0))
        .label_font(scale.font(SIZE))
        .draw()
        .map_err(text_of)
}

fn widest<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    texts: &[String],
    font: &TextStyle<'_>,
) -> Outcome<i32> {
    texts.iter().try_fold(0, |widest, text| {
        let (width, _) = area.estimate_text_size(text, font).map_err(text_of)?;
        Ok(widest.max(width as i32))
    })
}

fn text_of(error: impl std::error::Error) -> String {
    error.to_string()
}

/// The first `longest` characters. Control characters, which XML forbids and fonts have no glyph
/// for, become spaces.
fn short(text: &str, longest: usize) -> String {
    let start = text.chars().take(longest).map(|c| if c.is_control() { ' ' } else { c });
    let more = text.chars().nth(longest).map_or("", |_| "...");
    start.chain(more.chars()).collect()
}

/// Returns the axis of one coordinate of all points.
fn axis(
    chart: &Chart,
    name: &str,
    log: bool,
    margin: f64,
    coordinate: fn(&(f64, f64)) -> f64,
) -> Outcome<Axis> {
    for series in &chart.series {
        for (i, point) in series.points.iter().enumerate() {
            check(coordinate(point), log)
                .map_err(|why| format!("{name} of point {i} of series {}: {why}", series.name))?;
        }
    }
    let points = chart.series.iter().flat_map(|series| &series.points);
    let axis = Axis::new(&points.map(coordinate).collect::<Vec<_>>(), log, margin);
    axis.ok_or_else(|| "there are no points".to_string())
}

/// Appearance of a series in plot and legend; lengths in pixels.
#[derive(Clone, Copy, Default)]
struct Look {
    color: RGBColor,
    style: Style,
    /// Width of lines; nothing is drawn with 0.
    width: u32,
    dash: Option<(i32, i32)>,
    marker: usize,
    radius: i32,
}

impl Look {
    fn of(i: usize, style: Style, scale: Scale) -> Self {
        Self {
            color: PALETTE[i % PALETTE.len()],
            style,
            width: scale.px(2.0) as u32,
            dash: DASHES[i % DASHES.len()].map(|(dash, gap)| (scale.px(dash), scale.px(gap))),
            marker: i,
            radius: scale.px(4.5),
        }
    }

    fn of_mark(scale: Scale) -> Self {
        let style = Self::of(1, Style::Line, scale);
        Self { color: MARK, width: style.width / 2, ..style }
    }

    /// Draws a line through `points`, markers on them, or both.
    fn through(self, points: Vec<Point>) -> Drawn {
        // A line through a single point would not be seen.
        let only = points.len() == 1;
        let n_line = if self.style == Style::Points || only { 0 } else { points.len() };
        let marked = if self.style != Style::Line || only { &points[..] } else { &[] };
        Drawn { look: self, points: [&points[..n_line], marked].concat(), n_line }
    }

    /// Draws the legend's sample of the series; `(x, y)` is its left end.
    fn sample(self, (x, y): Point, length: i32) -> Drawn {
        let ends = [(x, y), (x + length, y), (x + length / 2, y)];
        let (points, n_line) = match self.style {
            _ if self.width == 0 => (&ends[..0], 0),
            Style::Line => (&ends[..2], 2),
            Style::Points => (&ends[2..], 0),
            Style::LinePoints => (&ends[..], 2),
        };
        Drawn { look: self, points: points.to_vec(), n_line }
    }
}

/// The first `n_line` of `points` are joined, the others marked.
struct Drawn {
    look: Look,
    points: Vec<Point>,
    n_line: usize,
}

impl<'a> PointCollection<'a, Point> for &'a Drawn {
    type Point = &'a Point;
    type IntoIter = core::slice::Iter<'a, Point>;

    fn point_iter(self) -> Self::IntoIter {
        self.points.iter()
    }
}

impl<DB: DrawingBackend> Drawable<DB> for Drawn {
    fn draw<I: Iterator<Item = Point>>(
        &self,
        points: I,
        to: &mut DB,
        size: (u32, u32),
    ) -> Result<(), plotters_backend::DrawingErrorKind<DB::ErrorType>> {
        let Look { color, width, dash, marker, radius: r, .. } = self.look;
        let points: Vec<Point> = points.collect();
        let (line, marked) = points.split_at(self.n_line.min(points.len()));
        let (style, all) = (ShapeStyle::from(&color).stroke_width(width), line.iter().copied());
        match dash {
            _ if line.is_empty() => (),
            None => PathElement::new(line, style).draw(all, to, size)?,
            Some((dash, gap)) => {
                DashedPathElement::new(all.clone(), dash, gap, style).draw(all, to, size)?
            }
        }
        for &(x, y) in marked {
            let at = core::iter::once((x, y));
            let corners = [(x - r, y - r), (x + r, y + r)];
            match marker % 4 {
                0 => Circle::new((0, 0), r, style.filled()).draw(at, to, size)?,
                1 => Rectangle::new(corners, style.filled()).draw(corners.into_iter(), to, size)?,
                2 => TriangleMarker::new((0, 0), r * 5 / 4, style.filled()).draw(at, to, size)?,
                _ => Cross::new((0, 0), r, style).draw(at, to, size)?,
            }
        }
        Ok(())
    }
}
