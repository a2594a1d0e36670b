//! Charts of points and lines, as SVG and PNG, with the same look everywhere.

mod axis;
mod draw;

use std::path::Path;

use plotters::prelude::{BitMapBackend, SVGBackend};

use crate::{Error, Result, files::write};

/// Size of the SVG in pixels; the PNG has [`PNG_SCALE`] times as many.
const SIZE: (u32, u32) = (900, 520);
const PNG_SCALE: f64 = 1.5;

/// Drawing style of a series.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    /// A line through them.
    #[default]
    Line,
    /// A marker on each.
    Points,
    /// Both.
    LinePoints,
}

/// Points of one kind, in the order a line passes through them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// `(x, y)`.
    pub points: Vec<(f64, f64)>,
    /// Drawing style of the points.
    pub style: Style,
}

impl Series {
    /// A series.
    pub fn new(name: impl Into<String>, points: Vec<(f64, f64)>, style: Style) -> Self {
        Self { name: name.into(), points, style }
    }
}

/// One pair of axes and the series over them. Colors stay apart for color-blind readers; lines also
/// differ by dashes, points by markers.
///
/// ```
/// use kv_report::chart::{Chart, Series, Style};
///
/// let loss = Series::new("loss", vec![(1.0, 4.2), (2.0, 3.1)], Style::Line);
/// let chart = Chart {
///     title: "Training".to_string(),
///     x_label: "step".to_string(),
///     series: vec![loss],
///     ..Chart::default()
/// };
/// assert!(chart.svg()?.starts_with("<svg"));
/// # Ok::<(), kv_report::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chart {
    /// Above the chart.
    pub title: String,
    /// Below the horizontal axis.
    pub x_label: String,
    /// Beside the vertical axis.
    pub y_label: String,
    /// Use a logarithmic horizontal axis.
    pub log_x: bool,
    /// Use a logarithmic vertical axis.
    pub log_y: bool,
    /// The series to draw.
    pub series: Vec<Series>,
    /// Vertical lines with a name each, in the legend; those outside the range of the points are
    /// left out.
    pub vertical_marks: Vec<(f64, String)>,
}

impl Chart {
    /// The chart as an `<svg>` element, 900 by 520 pixels.
    ///
    /// # Errors
    /// [`Error::Chart`] for no points at all, a coordinate that is NaN, infinite or beyond 1e300,
    /// or one that is not above 0 on a logarithmic axis.
    pub fn svg(&self) -> Result<String> {
        let mut svg = String::new();
        draw::draw(self, SVGBackend::with_string(&mut svg, SIZE), 1.0)
            .map_err(|why| self.error(why))?;
        Ok(svg)
    }

    /// Writes [`svg`](Self::svg) to a file.
    ///
    /// # Errors
    /// Fails as [`svg`](Self::svg) does, and with [`Error::Write`].
    pub fn write_svg(&self, path: impl AsRef<Path>) -> Result<()> {
        write(path.as_ref(), self.svg()?.as_bytes())
    }

    /// The chart as a PNG, 1350 by 780 pixels. Its text needs no font of the system.
    ///
    /// # Errors
    /// Fails as [`svg`](Self::svg) does.
    pub fn png(&self) -> Result<Vec<u8>> {
        let [width, height] = [SIZE.0, SIZE.1].map(|side| (f64::from(side) * PNG_SCALE) as u32);
        let mut rgb = vec![0; (3 * width * height) as usize];
        let backend = BitMapBackend::with_buffer(&mut rgb, (width, height));
        draw::draw(self, backend, PNG_SCALE).map_err(|why| self.error(why))?;
        let mut bytes = vec![];
        let mut encoder = png::Encoder::new(&mut bytes, width, height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let written = encoder.write_header().and_then(|mut writer| {
            writer.write_image_data(&rgb)?;
            writer.finish()
        });
        written.map_err(|error| self.error(error.to_string()))?;
        Ok(bytes)
    }

    /// Writes [`png`](Self::png) to a file.
    ///
    /// # Errors
    /// Fails as [`svg`](Self::svg) does, with [`Error::Chart`] for a path that does not end in
    /// `.png`, and with [`Error::Write`].
    pub fn write_png(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        if !path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("png")) {
            return Err(self.error(format!("{}: the name must end in .png", path.display())));
        }
        write(path, &self.png()?)
    }

    fn error(&self, why: String) -> Error {
        Error::Chart { title: self.title.clone(), why }
    }
}
