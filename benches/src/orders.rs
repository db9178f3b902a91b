//! What a comparison says to its sides, and they to it: lines on stdin and stdout.
//!
//! A side is a process that lives as long as the comparison, so that each is warm, and does only
//! what it is ordered, so that never two work at once.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use stoker_trainer::Result;

/// What a training side says first.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Ready {
    /// Trained numbers of the model.
    pub(crate) parameters: usize,
}

/// What a training side answers to a number of steps.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct Steps {
    /// Each step's time.
    pub(crate) nanoseconds: Vec<u64>,
    /// The first and the last step's loss.
    pub(crate) losses: (f64, f64),
}

/// The next order of this side; `None` where there are no more.
pub(crate) fn next() -> Result<Option<String>> {
    let mut line = String::new();
    let length = std::io::stdin().lock().read_line(&mut line)?;
    Ok((length > 0).then(|| line.trim_end().to_owned()))
}

/// Answers an order.
pub(crate) fn answer(answer: &impl Serialize) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    serde_json::to_writer(&mut stdout, answer)?;
    stdout.write_all(b"\n")?;
    Ok(stdout.flush()?)
}

/// Another process of a comparison.
#[derive(Debug)]
pub(crate) struct Side {
    name: String,
    process: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Side {
    /// Starts it.
    pub(crate) fn start(name: &str, command: &mut Command) -> Result<Self> {
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut process = spawned.map_err(|error| format!("{name} cannot be started: {error}"))?;
        let (orders, answers) = (process.stdin.take(), process.stdout.take());
        let answers = BufReader::new(answers.ok_or("a side without stdout")?);
        Ok(Self { name: name.into(), process, orders, answers })
    }

    /// Orders, and waits for the answer.
    pub(crate) fn ask<T: DeserializeOwned>(&mut self, order: &str) -> Result<T> {
        self.order(order)?;
        self.hear()
    }

    /// Orders alone.
    pub(crate) fn order(&mut self, order: &str) -> Result<()> {
        let orders = self.orders.as_mut().ok_or("a side that has ended")?;
        Ok(writeln!(orders, "{order}").map_err(|error| format!("{}: {error}", self.name))?)
    }

    /// Ends it without a word.
    pub(crate) fn kill(&mut self) {
        let _ = self.process.kill();
    }

    /// Waits for what it says of itself.
    pub(crate) fn hear<T: DeserializeOwned>(&mut self) -> Result<T> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            return Err(format!("{} has ended; it says why above", self.name).into());
        }
        let answer = serde_json::from_str(&line);
        Ok(answer.map_err(|error| format!("{} answered {line:?}: {error}", self.name))?)
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.orders = None; // No more orders: it ends.
        let _ = self.process.wait();
    }
}
