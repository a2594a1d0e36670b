//! Pictures of half blocks in 24-bit color, and keys.

use std::{
    io::{Write, stdout},
    time::{Duration, Instant},
};

use anyhow::Result;
use crossterm::{
    cursor::{Hide, MoveTo, Show},
    event::{Event, KeyCode, KeyEventKind, KeyModifiers, poll, read},
    execute,
    style::{Color, Print, ResetColor, SetBackgroundColor, SetForegroundColor},
    terminal::{
        Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode,
        enable_raw_mode, size,
    },
};
use kv_world::{Frame, Input, Player};

/// The least time from a frame to the next.
const FRAME: Duration = Duration::from_millis(80);
/// Columns between pictures.
const GAP: usize = 2;

const KEYS: &str = "w s, up, down: walk   a d: step aside   q e, left, right: turn   Esc: leave";

/// Puts the terminal back as it was, whatever ends the game.
struct Screen;

impl Screen {
    fn open() -> Result<Self> {
        enable_raw_mode()?;
        let screen = Self;
        execute!(stdout(), EnterAlternateScreen, Hide, Clear(ClearType::All))?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // There is nobody left to tell.
        let _ = execute!(stdout(), ResetColor, Show, LeaveAlternateScreen);
        let _ = disable_raw_mode();
    }
}

/// Plays until Esc or Ctrl-C: `next` makes the pictures, which have `names`, of what the keys say.
pub(crate) fn play(
    names: &[String],
    mut next: impl FnMut(Input) -> Result<Vec<Frame>>,
) -> Result<()> {
    let _screen = Screen::open()?;
    loop {
        let start = Instant::now();
        let Some(input) = pressed()? else { return Ok(()) };
        let frames = next(input)?;
        draw(names, &frames)?;
        std::thread::sleep(FRAME.saturating_sub(start.elapsed()));
    }
}

/// Returns the keys pressed since the last frame; `None` to leave. A terminal does not report key
/// releases, so a key counts for one frame, and again while it repeats.
fn pressed() -> Result<Option<Input>> {
    let mut input = Input::default();
    while poll(Duration::ZERO)? {
        let Event::Key(key) = read()? else { continue };
        if key.kind == KeyEventKind::Release {
            continue;
        }
        match key.code {
            KeyCode::Esc => return Ok(None),
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Ok(None),
            KeyCode::Up | KeyCode::Char('w') => input.forward = true,
            KeyCode::Down | KeyCode::Char('s') => input.back = true,
            KeyCode::Char('a') => input.left = true,
            KeyCode::Char('d') => input.right = true,
            KeyCode::Left | KeyCode::Char('q' | '<' | ',') => input.turn -= 2,
            KeyCode::Right | KeyCode::Char('e' | '>' | '.') => input.turn += 2,
            _ => {}
        }
        input.turn = input.turn.clamp(-Player::MAX_TURN, Player::MAX_TURN);
    }
    Ok(Some(input))
}

/// As many pictures as there is room for.
fn draw(names: &[String], frames: &[Frame]) -> Result<()> {
    let (columns, _) = size()?;
    let width = Frame::SIZE + GAP;
    let shown = ((usize::from(columns) + GAP) / width).clamp(1, frames.len());
    let mut out = Vec::new();
    for (i, (name, frame)) in names.iter().zip(frames).take(shown).enumerate() {
        let left = (i * width) as u16;
        execute!(out, MoveTo(left, 0), ResetColor, Print(format_args!("{name:<48.48}")))?;
        for row in 0..Frame::SIZE / 2 {
            execute!(out, MoveTo(left, row as u16 + 1))?;
            for column in 0..Frame::SIZE {
                let color = |row: usize| {
                    let rgb = &frame.rgb()[3 * (row * Frame::SIZE + column)..][..3];
                    Color::Rgb { r: rgb[0], g: rgb[1], b: rgb[2] }
                };
                let (upper, lower) = (color(2 * row), color(2 * row + 1));
                execute!(out, SetForegroundColor(upper), SetBackgroundColor(lower), Print('▀'))?;
            }
            execute!(out, ResetColor)?;
        }
    }
    execute!(out, MoveTo(0, Frame::SIZE as u16 / 2 + 2), Print(KEYS))?;
    let mut stdout = stdout().lock();
    stdout.write_all(&out)?;
    stdout.flush()?;
    Ok(())
}
