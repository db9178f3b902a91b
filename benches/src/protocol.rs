//! Protocol between a comparison and its sides: lines on stdin and stdout.
//!
//! A side is a process that runs for the whole comparison, so that it stays warm. It works only on
//! command, so that two sides never work at the same time.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use stoker_trainer::Result;

/// First message of a training side.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Ready {
    /// Number of trainable parameters of the model.
    pub(crate) parameters: usize,
}

/// Response of a training side to a command to train a number of steps.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct Steps {
    /// Time of each step.
    pub(crate) nanoseconds: Vec<u64>,
    /// Losses of the first and the last step.
    pub(crate) losses: (f64, f64),
}

/// Reads the next command of this side; `None` at the end of stdin.
pub(crate) fn next_command() -> Result<Option<String>> {
    let mut line = String::new();
    let length = std::io::stdin().lock().read_line(&mut line)?;
    Ok((length > 0).then(|| line.trim_end().to_owned()))
}

/// Writes the response to a command.
pub(crate) fn respond(response: &impl Serialize) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    serde_json::to_writer(&mut stdout, response)?;
    stdout.write_all(b"\n")?;
    Ok(stdout.flush()?)
}

/// Another process of a comparison.
#[derive(Debug)]
pub(crate) struct Side {
    name: String,
    process: Child,
    commands: Option<ChildStdin>,
    responses: BufReader<ChildStdout>,
}

impl Side {
    /// Starts the process.
    pub(crate) fn start(name: &str, command: &mut Command) -> Result<Self> {
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut process = spawned.map_err(|error| format!("cannot start {name}: {error}"))?;
        let (commands, responses) = (process.stdin.take(), process.stdout.take());
        let responses = BufReader::new(responses.ok_or("a side without stdout")?);
        Ok(Self { name: name.into(), process, commands, responses })
    }

    /// Sends a command and waits for the response.
    pub(crate) fn request<T: DeserializeOwned>(&mut self, command: &str) -> Result<T> {
        self.send(command)?;
        self.receive()
    }

    /// Sends a command without waiting for the response.
    pub(crate) fn send(&mut self, command: &str) -> Result<()> {
        let commands = self.commands.as_mut().ok_or("the side has ended")?;
        Ok(writeln!(commands, "{command}").map_err(|error| format!("{}: {error}", self.name))?)
    }

    /// Kills the process.
    pub(crate) fn kill(&mut self) {
        let _ = self.process.kill();
    }

    /// Returns the greatest resident memory of the process so far.
    pub(crate) fn peak_mib(&self) -> Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = peak.and_then(|peak| peak.trim().trim_end_matches(" kB").parse::<f64>().ok());
        Ok(kib.ok_or("the status of a process has no VmHWM")? / 1024.0)
    }

    /// Waits for the next message of the process.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self) -> Result<T> {
        let mut line = String::new();
        if self.responses.read_line(&mut line)? == 0 {
            return Err(format!("{} has ended; the output above has the reason", self.name).into());
        }
        let response = serde_json::from_str(&line);
        Ok(response.map_err(|error| format!("{} answered {line:?}: {error}", self.name))?)
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.commands = None; // The process ends when its stdin is closed.
        let _ = self.process.wait();
    }
}
