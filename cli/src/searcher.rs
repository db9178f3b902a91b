//! External searchers of `stoker run` and `stoker simulate`: a URL on this machine, or a program.
//!
//! A program reads one question per line from its standard input, and writes one answer per line to
//! its standard output. It dies with this process.

use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use stoker_api::experiment::ExternalSearch;
use stoker_api::external::{
    ANSWER_BYTES_MAX, ANSWER_SECONDS_MAX, Answer, Question, SearcherHost, SearcherUrl,
};
use stoker_searcher::{ANSWER_TIMEOUT, AskError};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::failure::Failure;
use crate::print;
use crate::run::open_files;
use crate::run::programs::require_program;

/// Time within which a program must answer the first question after its start. It includes loading
/// the program, and repeating the history of the search.
const START_TIMEOUT: Duration = Duration::from_mins(10);
/// Time within which a program must exit after the end of its input.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// An external searcher that this machine can ask.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    /// A service on a loopback address.
    Url(SearcherUrl),
    /// A program and its arguments.
    Command(Vec<String>),
}

impl Target {
    /// Returns the searcher of a valid experiment.
    ///
    /// # Errors
    ///
    /// [`Failure::Input`] if it is on another machine, or if its program is not found.
    pub(crate) fn new(search: &ExternalSearch) -> Result<Self, Failure> {
        const PATH: &str = "spec.searcher.external";
        if let Some(program) = search.command.first() {
            require_program(&format!("{PATH}.command[0]"), program, Path::new("."))?;
            return Ok(Self::Command(search.command.clone()));
        }
        let url = search.url.as_deref().unwrap_or_default();
        match SearcherUrl::parse(url) {
            Ok(parsed) if matches!(parsed.host, SearcherHost::Loopback(_)) => Ok(Self::Url(parsed)),
            _ => Err(Failure::Input(format!(
                "{PATH}.url is `{url}`: only a cluster reaches Services; start the searcher on \
                 this machine, with --set searcher.external.url=http://127.0.0.1:PORT"
            ))),
        }
    }
}

/// Asks a searcher. Keeps the program between questions, and starts it if it does not run.
#[derive(Debug)]
pub(crate) struct Searcher {
    target: Target,
    program: Option<Program>,
}

impl Searcher {
    /// Returns a searcher whose program has not been started.
    pub(crate) fn new(target: Target) -> Self {
        Self { target, program: None }
    }

    /// Returns whether the next question goes to a program that is started for it.
    pub(crate) fn is_starting(&self) -> bool {
        matches!(self.target, Target::Command(_)) && self.program.is_none()
    }

    /// Asks a question. After an error, the program is ended, and started again for the next one.
    ///
    /// # Errors
    ///
    /// See [`AskError`].
    pub(crate) async fn ask(&mut self, question: &Question) -> Result<Answer, AskError> {
        let command = match &self.target {
            Target::Url(url) => {
                return stoker_searcher::ask(&url.host.name_in(""), url, question).await;
            }
            Target::Command(command) => command,
        };
        let (mut program, is_new) = match self.program.take() {
            Some(program) => (program, false),
            None => (Program::start(command)?, true),
        };
        let answer = {
            let answer = program.ask(question);
            tokio::pin!(answer);
            match timeout(ANSWER_TIMEOUT, &mut answer).await {
                Ok(answer) => answer?,
                Err(_) if is_new => {
                    let (name, minutes) = (command.join(" "), START_TIMEOUT.as_secs() / 60);
                    print::err(format!(
                        "`{name}` has not answered its first question within \
                         {ANSWER_SECONDS_MAX} s; it has {minutes} min to start"
                    ));
                    let more = START_TIMEOUT - ANSWER_TIMEOUT;
                    timeout(more, answer).await.map_err(|_| late(command, START_TIMEOUT))??
                }
                Err(_) => return Err(late(command, ANSWER_TIMEOUT)),
            }
        };
        self.program = Some(program);
        Ok(answer)
    }

    /// Ends the program, so that it is started again for the next question.
    pub(crate) fn restart(&mut self) {
        self.program = None;
    }

    /// Ends the input of the program, and waits a short time for its exit.
    pub(crate) async fn finish(&mut self) {
        if let Some(Program { mut child, stdin, .. }) = self.program.take() {
            drop(stdin);
            let _ = timeout(EXIT_TIMEOUT, child.wait()).await;
        }
    }
}

fn late(command: &[String], limit: Duration) -> AskError {
    let (name, seconds) = (command.join(" "), limit.as_secs());
    AskError::Unavailable(format!("no answer of `{name}` within {seconds} s"))
}

/// A running program. Dropping it kills it.
#[derive(Debug)]
struct Program {
    name: String,
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Program {
    fn start(command: &[String]) -> Result<Self, AskError> {
        let name = command.join(" ");
        let failed = |error: std::io::Error| {
            AskError::Unavailable(format!("cannot start `{name}`: {error}"))
        };
        // The program dies with this process, even if this process is killed.
        let this = std::process::id().to_string();
        let mut child = Command::new("/proc/self/exe")
            .arg("supervise")
            .args(open_files::supervise_args())
            .args(["--parent", &this, "--"])
            .args(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C in the terminal must reach only the runner.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(failed)?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(failed(std::io::Error::other("it has no standard input or output")));
        };
        Ok(Self { name, child, stdin, stdout: BufReader::new(stdout) })
    }

    async fn ask(&mut self, question: &Question) -> Result<Answer, AskError> {
        let line = serde_json::to_string(question).map_err(|error| {
            AskError::Unavailable(format!("cannot serialize a question: {error}"))
        })?;
        // If the program has ended, reading tells more.
        let _ = self.stdin.write_all(format!("{line}\n").as_bytes()).await;
        let _ = self.stdin.flush().await;
        let mut answer = vec![];
        let mut limited = (&mut self.stdout).take(ANSWER_BYTES_MAX as u64 + 1);
        let read = limited.read_until(b'\n', &mut answer).await;
        let is_complete = answer.last() == Some(&b'\n') || answer.len() > ANSWER_BYTES_MAX;
        if read.is_err() || !is_complete {
            let end = self.child.wait().await.ok();
            return Err(self.ended(end));
        }
        stoker_searcher::parse(&answer)
    }

    fn ended(&self, end: Option<ExitStatus>) -> AskError {
        let end = end.map_or_else(|| "unknown status".to_owned(), |end| end.to_string());
        AskError::Unavailable(format!(
            "`{}` ended without an answer ({end}); see its messages above",
            self.name
        ))
    }
}
