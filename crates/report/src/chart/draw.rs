//! A [`Chart`] on any drawing backend. Everything is placed in pixels, so that it looks alike on all.

use std::sync::OnceLock;

use plotters::{
    coord::Shift,
    element::DashedPathElement,
    prelude::*,
    style::{
        register_font,
        text_anchor::{HPos, Pos, VPos},
    },
};

use super::{Chart, Series, Style, axis::Axis};

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

/// The family that the embedded font is registered as; in an SVG, the reader's own.
const FAMILY: &str = "sans-serif";

type Point = (i32, i32);
type Outcome<T = ()> = Result<T, String>;

/// Draws `chart` with every length multiplied by `scale`.
pub(super) fn draw<DB: DrawingBackend>(chart: &Chart, backend: DB, scale: f64) -> Outcome {
    static FONT: OnceLock<bool> = OnceLock::new();
    let font = epaint_default_fonts::UBUNTU_LIGHT;
    if !FONT.get_or_init(|| register_font(FAMILY, FontStyle::Normal, font).is_ok()) {
        return Err("the embedded font cannot be read".to_string());
    }
    let canvas = Canvas { area: backend.into_drawing_area(), scale };
    let plot = Plot::new(chart, &canvas)?;
    canvas.area.fill(&WHITE).map_err(text_of)?;
    plot.frame(chart)?;
    plot.marks(chart)?;
    for (i, series) in chart.series.iter().enumerate() {
        plot.series(i, series)?;
    }
    plot.names(chart)?;
    canvas.area.present().map_err(text_of)
}

fn text_of(error: impl std::error::Error) -> String {
    error.to_string()
}

struct Canvas<DB: DrawingBackend> {
    area: DrawingArea<DB, Shift>,
    scale: f64,
}

impl<DB: DrawingBackend> Canvas<DB> {
    /// A length in pixels.
    fn px(&self, length: f64) -> i32 {
        (length * self.scale).round() as i32
    }

    fn font(&self, size: f64, color: RGBColor, h: HPos, v: VPos) -> TextStyle<'static> {
        let style = (FAMILY, size * self.scale).into_text_style(&self.area);
        TextStyle { color: color.to_backend_color(), pos: Pos::new(h, v), ..style }
    }

    fn width(&self, text: &str, size: f64) -> Outcome<i32> {
        let style = self.font(size, TEXT, HPos::Left, VPos::Top);
        Ok(self.area.estimate_text_size(text, &style).map_err(text_of)?.0 as i32)
    }

    fn text(&self, text: &str, at: Point, style: TextStyle<'_>) -> Outcome {
        // Control characters have no place in XML, and no glyph.
        let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        self.area.draw(&Text::new(text, at, style)).map_err(text_of)
    }

    /// As much of `text` as fits.
    fn fit(&self, text: &str, size: f64, width: i32) -> Outcome<String> {
        if self.width(text, size)? <= width {
            return Ok(text.to_string());
        }
        let mut short: String = text.chars().take(200).collect();
        while short.pop().is_some() && self.width(&format!("{short}..."), size)? > width {}
        Ok(short + "...")
    }

    fn line(
        &self,
        points: Vec<Point>,
        color: RGBColor,
        width: f64,
        dash: Option<(f64, f64)>,
    ) -> Outcome {
        let style = ShapeStyle::from(&color).stroke_width((width * self.scale).round() as u32);
        match dash {
            None => self.area.draw(&PathElement::new(points, style)),
            Some((dash, gap)) => {
                let (dash, gap) = (self.px(dash), self.px(gap));
                self.area.draw(&DashedPathElement::new(points, dash, gap, style))
            }
        }
        .map_err(text_of)
    }

    /// The marker of series `i`.
    fn marker(&self, i: usize, at: Point) -> Outcome {
        let style = ShapeStyle::from(&PALETTE[i % PALETTE.len()]);
        let r = self.px(4.5);
        let corner = |dx: i32, dy: i32| (at.0 + dx * r, at.1 + dy * r);
        match i % 4 {
            0 => self.area.draw(&Circle::new(at, r, style.filled())),
            1 => self.area.draw(&Rectangle::new([corner(-1, -1), corner(1, 1)], style.filled())),
            2 => self.area.draw(&TriangleMarker::new(at, r * 5 / 4, style.filled())),
            _ => self.area.draw(&Cross::new(at, r, style.stroke_width(self.px(2.0) as u32))),
        }
        .map_err(text_of)
    }
}

/// A rectangle in pixels.
#[derive(Clone, Copy)]
struct Area {
    left: i32,
    top: i32,
    right: i32,
    bottom: i32,
}

impl Area {
    fn overlaps(&self, other: &Self) -> bool {
        self.left < other.right
            && other.left < self.right
            && self.top < other.bottom
            && other.top < self.bottom
    }

    fn within(&self, other: &Self) -> bool {
        self.left >= other.left
            && self.right <= other.right
            && self.top >= other.top
            && self.bottom <= other.bottom
    }
}

struct Plot<'a, DB: DrawingBackend> {
    canvas: &'a Canvas<DB>,
    x: Axis,
    y: Axis,
    /// Inside the axes.
    inner: Area,
    /// Legend entries: index and name, shortened.
    legend: Vec<(usize, String)>,
}

const TITLE_SIZE: f64 = 20.0;
const SIZE: f64 = 15.0;
/// Length of the sample line in the legend.
const SAMPLE: f64 = 30.0;

/// Whether the name of the series is written beside its point.
fn is_labelled(series: &Series) -> bool {
    series.style == Style::Points && series.points.len() == 1
}

impl<'a, DB: DrawingBackend> Plot<'a, DB> {
    fn new(chart: &Chart, canvas: &'a Canvas<DB>) -> Outcome<Self> {
        let axis = |name: &str, log: bool, margin: f64, coordinate: fn(&(f64, f64)) -> f64| {
            // A bad coordinate is found by the series it is in, to name it.
            for series in &chart.series {
                for (i, point) in series.points.iter().enumerate() {
                    if let Err(why) = Axis::new(&[coordinate(point)], log, margin) {
                        return Err(format!(
                            "{name} of point {i} of series {}: {why}",
                            series.name
                        ));
                    }
                }
            }
            let points = chart.series.iter().flat_map(|series| &series.points);
            Axis::new(&points.map(coordinate).collect::<Vec<_>>(), log, margin)
        };
        // Names beside points need room.
        let margins =
            if chart.series.iter().any(is_labelled) { (0.12, 0.12) } else { (0.02, 0.06) };
        let x = axis("x", chart.log_x, margins.0, |point| point.0)?;
        let y = axis("y", chart.log_y, margins.1, |point| point.1)?;

        let (width, height) = canvas.area.dim_in_pixel();
        let (width, height) = (width as i32, height as i32);
        let mut legend = Vec::new();
        let mut legend_width = 0;
        for (i, series) in chart.series.iter().enumerate().filter(|(_, s)| !is_labelled(s)) {
            let name = canvas.fit(&series.name, SIZE, width * 3 / 10)?;
            legend_width = legend_width.max(canvas.width(&name, SIZE)?);
            legend.push((i, name));
        }
        let right = match legend.is_empty() {
            true => canvas.px(24.0),
            false => legend_width + canvas.px(SAMPLE + 36.0),
        };
        let mut tick_width = 0;
        for (_, text) in &y.ticks {
            tick_width = tick_width.max(canvas.width(text, SIZE)?);
        }
        let marks = if chart.vertical_marks.is_empty() { 0.0 } else { 20.0 };
        let inner = Area {
            left: tick_width + canvas.px(46.0),
            top: canvas.px(46.0 + marks),
            right: width - right,
            bottom: height - canvas.px(56.0),
        };
        Ok(Self { canvas, x, y, inner, legend })
    }

    fn x_px(&self, value: f64) -> i32 {
        let Area { left, right, .. } = self.inner;
        left + (self.x.place(value) * f64::from(right - left)).round() as i32
    }

    fn y_px(&self, value: f64) -> i32 {
        let Area { top, bottom, .. } = self.inner;
        bottom - (self.y.place(value) * f64::from(bottom - top)).round() as i32
    }

    /// Title, axes, grid, ticks and their labels.
    fn frame(&self, chart: &Chart) -> Outcome {
        let Area { left, top, right, bottom } = self.inner;
        let canvas = self.canvas;
        let (width, height) = canvas.area.dim_in_pixel();
        let (width, height) = (width as i32, height as i32);
        let gap = canvas.px(7.0);
        for &(value, ref text) in &self.x.ticks {
            let x = self.x_px(value);
            canvas.line(vec![(x, top), (x, bottom)], GRID, 1.0, None)?;
            let style = canvas.font(SIZE, TEXT, HPos::Center, VPos::Top);
            canvas.text(text, (x, bottom + gap), style)?;
        }
        for &(value, ref text) in &self.y.ticks {
            let y = self.y_px(value);
            canvas.line(vec![(left, y), (right, y)], GRID, 1.0, None)?;
            let style = canvas.font(SIZE, TEXT, HPos::Right, VPos::Center);
            canvas.text(text, (left - gap, y), style)?;
        }
        canvas.line(vec![(left, top), (left, bottom), (right, bottom)], TEXT, 1.0, None)?;

        let middle = (left + right) / 2;
        let title = canvas.fit(&chart.title, TITLE_SIZE, width - canvas.px(32.0))?;
        let style = canvas.font(TITLE_SIZE, TEXT, HPos::Center, VPos::Top);
        canvas.text(&title, (width / 2, canvas.px(12.0)), style)?;
        let label = canvas.fit(&chart.x_label, SIZE, right - left)?;
        let style = canvas.font(SIZE, TEXT, HPos::Center, VPos::Bottom);
        canvas.text(&label, (middle, height - canvas.px(8.0)), style)?;
        let label = canvas.fit(&chart.y_label, SIZE, bottom - top)?;
        let style = canvas.font(SIZE, TEXT, HPos::Center, VPos::Top);
        let at = (canvas.px(8.0), (top + bottom) / 2);
        canvas.text(&label, at, style.transform(FontTransform::Rotate270))
    }

    fn marks(&self, chart: &Chart) -> Outcome {
        let Area { left, top, right, bottom } = self.inner;
        let mut free = left;
        for (value, name) in &chart.vertical_marks {
            let place = self.x.place(*value);
            if !(0.0..=1.0).contains(&place) {
                continue;
            }
            let x = self.x_px(*value);
            self.canvas.line(vec![(x, top), (x, bottom)], MARK, 1.0, Some((6.0, 4.0)))?;
            // Names stand side by side above the axes.
            let width = self.canvas.width(name, SIZE)?;
            let start = (x - width / 2).min(right - width).max(free);
            free = start + width + self.canvas.px(12.0);
            let style = self.canvas.font(SIZE, MARK, HPos::Left, VPos::Bottom);
            self.canvas.text(name, (start, top - self.canvas.px(4.0)), style)?;
        }
        Ok(())
    }

    fn series(&self, i: usize, series: &Series) -> Outcome {
        let points: Vec<Point> =
            series.points.iter().map(|&(x, y)| (self.x_px(x), self.y_px(y))).collect();
        // A line through a single point would not be seen.
        let only = points.len() == 1;
        if matches!(series.style, Style::Points | Style::LinePoints) || only {
            for &point in &points {
                self.canvas.marker(i, point)?;
            }
        }
        if series.style != Style::Points && !only {
            self.canvas.line(points, PALETTE[i % PALETTE.len()], 2.0, DASHES[i % DASHES.len()])?;
        }
        Ok(())
    }

    /// The legend, and names beside single points.
    fn names(&self, chart: &Chart) -> Outcome {
        let canvas = self.canvas;
        let Area { top, right, bottom, .. } = self.inner;
        let row = canvas.px(22.0);
        let rows = ((bottom - top) / row).max(1) as usize;
        let style = || canvas.font(SIZE, TEXT, HPos::Left, VPos::Center);
        let hidden = self.legend.len().saturating_sub(rows);
        let shown = if hidden > 0 { rows - 1 } else { self.legend.len() };
        let (start, end) = (right + canvas.px(14.0), right + canvas.px(14.0 + SAMPLE));
        for (at, &(i, ref name)) in self.legend.iter().take(shown).enumerate() {
            let y = top + row / 2 + at as i32 * row;
            let look = chart.series.get(i).map(|series| series.style).unwrap_or_default();
            if look != Style::Points {
                let color = PALETTE[i % PALETTE.len()];
                canvas.line(vec![(start, y), (end, y)], color, 2.0, DASHES[i % DASHES.len()])?;
            }
            if look != Style::Line {
                canvas.marker(i, ((start + end) / 2, y))?;
            }
            canvas.text(name, (end + canvas.px(7.0), y), style())?;
        }
        if hidden > 0 {
            let y = top + row / 2 + shown as i32 * row;
            canvas.text(&format!("and {} more", hidden + 1), (start, y), style())?;
        }
        self.labels(chart)
    }

    /// Names beside single points, each at the first of several places where it covers nothing.
    fn labels(&self, chart: &Chart) -> Outcome {
        let canvas = self.canvas;
        let (gap, height) = (canvas.px(9.0), canvas.px(18.0));
        let half = canvas.px(6.0);
        let labelled: Vec<(&str, Point)> = chart
            .series
            .iter()
            .filter(|series| is_labelled(series))
            .flat_map(|series| series.points.iter().map(|point| (series.name.as_str(), *point)))
            .map(|(name, (x, y))| (name, (self.x_px(x), self.y_px(y))))
            .collect();
        let around = |(x, y): Point| Area {
            left: x - half,
            top: y - half,
            right: x + half,
            bottom: y + half,
        };
        let mut taken: Vec<Area> = labelled.iter().map(|&(_, point)| around(point)).collect();
        for (name, (x, y)) in labelled {
            let name = canvas.fit(name, SIZE, (self.inner.right - self.inner.left) / 2)?;
            let width = canvas.width(&name, SIZE)?;
            let rows = [0, -1, 1, -2, 2, -3, 3, -4, 4];
            let places = rows.into_iter().flat_map(|row| {
                let columns = [x + gap, x - gap - width, x - width / 2];
                // Over or under the point, not on it.
                columns.into_iter().take(if row == 0 { 2 } else { 3 }).map(move |left| Area {
                    left,
                    top: y - height / 2 + row * height,
                    right: left + width,
                    bottom: y + height / 2 + row * height,
                })
            });
            let is_free = |place: &Area| {
                place.within(&self.inner) && !taken.iter().any(|area| area.overlaps(place))
            };
            let beside =
                Area { left: x + gap, top: y - half, right: x + gap + width, bottom: y + half };
            let place = places.into_iter().find(is_free).unwrap_or(beside);
            let style = canvas.font(SIZE, TEXT, HPos::Left, VPos::Center);
            canvas.text(&name, (place.left, (place.top + place.bottom) / 2), style)?;
            taken.push(place);
        }
        Ok(())
    }
}
