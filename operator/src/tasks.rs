//! Background tasks of a replica. Each must run until the replica ends.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;

use tokio::task::{Id, JoinError, JoinSet};

/// Tasks by name. Dropping this aborts all of them.
#[derive(Debug, Default)]
pub struct Tasks {
    set: JoinSet<()>,
    names: HashMap<Id, &'static str>,
}

/// A task that ended unexpectedly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedTask {
    /// Name of the task, such as `watch of pods`.
    pub task: &'static str,
    /// Panic message; `None` if the task returned.
    pub panic: Option<String>,
}

impl EndedTask {
    /// Describes a task that panicked.
    pub(crate) fn of_error(task: &'static str, error: JoinError) -> Self {
        Self { task, panic: Some(message(error)) }
    }
}

impl fmt::Display for EndedTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.panic {
            Some(panic) => write!(f, "task {:?} panicked: {panic}", self.task),
            None => write!(f, "task {:?} ended unexpectedly", self.task),
        }
    }
}

impl Tasks {
    /// Runs `task` in the background.
    pub fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let id = self.set.spawn(task).id();
        self.names.insert(id, name);
    }

    /// Waits until a task ends. Cancel-safe; waits forever if there are no tasks.
    pub async fn ended(&mut self) -> EndedTask {
        let Some(ended) = self.set.join_next_with_id().await else {
            return std::future::pending().await;
        };
        let id = ended.as_ref().map_or_else(JoinError::id, |(id, ())| *id);
        let task = self.names.remove(&id).unwrap_or("unnamed");
        match ended {
            Ok(_) => EndedTask { task, panic: None },
            Err(error) => EndedTask::of_error(task, error),
        }
    }

    /// Aborts all tasks and waits until they have ended.
    pub async fn shutdown(&mut self) {
        self.set.shutdown().await;
    }
}

/// Panic message of a task.
fn message(error: JoinError) -> String {
    let Ok(panic) = error.try_into_panic() else { return "aborted".to_owned() };
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn ended_tasks_are_named() {
        let mut tasks = Tasks::default();
        tasks.spawn("runs", std::future::pending());
        tasks.spawn("returns", async {});
        let returned = tasks.ended().await;
        assert_eq!(returned, EndedTask { task: "returns", panic: None });
        tasks.spawn("panics", async { panic!("no {}", "watch") });
        let panicked = tasks.ended().await;
        assert_eq!(panicked.to_string(), "task \"panics\" panicked: no watch");
        tasks.shutdown().await;
    }
}
