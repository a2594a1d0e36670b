//! A conversation with a model over standard input.

use std::{
    io::{self, BufRead, IsTerminal},
    sync::mpsc,
    thread,
};

use anyhow::{Context, Result};
use kv_cli::Screen;
use kv_cubecl::Target;
use kv_models::{ChatTemplate, chat::Message};

use crate::generate_writer::Writer;

/// Default cache capacity of a conversation, in tokens.
pub(crate) const CONVERSATION: usize = 4096;

/// An event that a conversation waits for.
enum Said {
    Line(io::Result<String>),
    End,
    /// Ctrl-C.
    Interrupt,
}

/// Holds a conversation over standard input, one line at a time.
pub(crate) fn converse<T: Target>(
    writer: &mut Writer<'_, T>,
    template: &ChatTemplate,
    talk: &mut Vec<Message>,
) -> Result<()> {
    let saved = writer.saved.as_ref().map_or(0, |saved| saved.tokens()[0].len());
    let capacity = CONVERSATION.max(saved.saturating_add(writer.options.max_tokens));
    writer.capacity.get_or_insert(capacity.min(writer.model.max_positions()));
    let asks = io::stdin().is_terminal();
    // A separate thread reads, so a signal can end the wait.
    let (sender, said) = mpsc::sync_channel(1);
    let wake = sender.clone();
    writer.interrupt.wait(move || drop(wake.try_send(Said::Interrupt)));
    thread::spawn(move || {
        let lines = io::stdin().lock().lines().map(Said::Line);
        lines.chain([Said::End]).try_for_each(|said| sender.send(said))
    });
    loop {
        if asks {
            Screen::Error.print("> ")?;
        }
        let line = match said.recv() {
            Ok(Said::Line(line)) => line.context("standard input: cannot read")?,
            Ok(Said::Interrupt) => String::new(),
            Ok(Said::End) | Err(_) => return Ok(()),
        };
        if writer.interrupt.ends() {
            writer.interrupted = true;
            return Ok(());
        }
        if !line.trim().is_empty() {
            writer.interrupt.begin();
            talk.push(Message::new("user", line));
            let ids = writer.tokenizer.encode(&template.render(talk)?)?;
            let answer = match writer.write(&ids) {
                Ok(answer) => answer,
                Err(error) => {
                    talk.pop();
                    return Err(error);
                }
            };
            // A turn without an answer is not part of the conversation.
            match std::mem::take(&mut writer.interrupted) && answer.is_empty() {
                true => drop(talk.pop()),
                false => talk.push(Message::new("assistant", answer)),
            }
        }
        writer.interrupt.pause();
        if writer.interrupt.ends() {
            writer.interrupted = true;
            return Ok(());
        }
    }
}
