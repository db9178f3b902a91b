//! Names of objects on the command line, and commands on several of them.

use std::cell::Cell;
use std::fmt;

use clap::Args;

use crate::failure::Failure;
use crate::print::{self, Format, Output};

/// Names of experiments.
#[derive(Clone, Debug, Args)]
pub(crate) struct ExperimentNames {
    /// Experiment names, as in `stoker experiment list`
    #[arg(value_name = "EXPERIMENT", required = true, value_parser = parse_name)]
    pub(crate) experiments: Vec<String>,
}

/// Names of jobs.
#[derive(Clone, Debug, Args)]
pub(crate) struct JobNames {
    /// Job names, as in `stoker job list`
    #[arg(value_name = "JOB", required = true, value_parser = parse_name)]
    pub(crate) jobs: Vec<String>,
}

/// Names of trials.
#[derive(Clone, Debug, Args)]
pub(crate) struct TrialNames {
    /// Trial names, EXPERIMENT-INDEX. `mnist 0 1` and `mnist/0 mnist/1` mean mnist-0 and mnist-1
    #[arg(value_name = "TRIAL", required = true, value_parser = parse_name)]
    trials: Vec<String>,
}

/// Name of one trial.
#[derive(Clone, Debug, Args)]
pub(crate) struct TrialName {
    /// Trial name, EXPERIMENT-INDEX. `mnist 0` and `mnist/0` mean mnist-0
    #[arg(value_name = "TRIAL", value_parser = parse_name)]
    trial: String,
    /// Trial index, if TRIAL is an experiment name
    index: Option<u32>,
}

impl TrialNames {
    /// Returns the trials.
    pub(crate) fn parse(&self) -> Result<Vec<TrialRef>, Failure> {
        let mut trials = Vec::new();
        let mut words = self.trials.iter().peekable();
        while let Some(word) = words.next() {
            let mut has_index = false;
            while let Some(index) = words.next_if(|next| is_number(next)) {
                trials.push(TrialRef::new(word, Some(index))?);
                has_index = true;
            }
            if !has_index {
                trials.push(TrialRef::new(word, None)?);
            }
        }
        Ok(trials)
    }
}

impl TrialName {
    /// Returns the trial.
    pub(crate) fn parse(&self) -> Result<TrialRef, Failure> {
        TrialRef::new(&self.trial, self.index.map(|index| index.to_string()).as_deref())
    }
}

/// A trial of an experiment. Displayed as `EXPERIMENT-INDEX`, its name on a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TrialRef {
    pub(crate) experiment: String,
    pub(crate) index: u32,
}

impl fmt::Display for TrialRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.experiment, self.index)
    }
}

impl TrialRef {
    fn new(word: &str, index: Option<&str>) -> Result<Self, Failure> {
        let trial = match index {
            Some(index) if is_experiment(word) => Self::from_parts(word, index),
            Some(_) => None,
            None => Self::split(word),
        };
        trial.ok_or_else(|| {
            let last = word.rsplit(['-', '/']).next().filter(|_| index.is_none());
            if let Some(large) = index.or(last).filter(|index| is_large(index)) {
                let max = u32::MAX;
                return Failure::Input(format!(
                    "trial index {large} is too large; use at most {max}"
                ));
            }
            let example = if is_experiment(word) { word } else { "mnist" };
            Failure::Input(format!(
                "`{}` is not a trial name; write EXPERIMENT-INDEX, such as {example}-0",
                index.map_or_else(|| word.to_owned(), |index| format!("{word} {index}"))
            ))
        })
    }

    /// Parses `EXPERIMENT-INDEX` or `EXPERIMENT/INDEX`.
    pub(crate) fn split(word: &str) -> Option<Self> {
        let (experiment, index) = word.rsplit_once('/').or_else(|| word.rsplit_once('-'))?;
        Self::from_parts(experiment, index)
    }

    fn from_parts(experiment: &str, index: &str) -> Option<Self> {
        let index = Some(index).filter(|index| is_number(index))?.parse().ok()?;
        is_experiment(experiment).then(|| Self { experiment: experiment.to_owned(), index })
    }
}

/// Returns `true` if the text may be the name of an experiment, which starts with a letter.
fn is_experiment(text: &str) -> bool {
    text.starts_with(|char: char| char.is_ascii_lowercase()) && !text.contains('/')
}

/// Returns `true` if the text is a number, but too large for the index of a trial.
fn is_large(text: &str) -> bool {
    is_number(text) && text.parse::<u32>().is_err()
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Removes the kind from a name of `--output name`, such as `experiment.stoker.dev/mnist`.
pub(crate) fn parse_name(text: &str) -> Result<String, String> {
    let name = match text.split_once('/') {
        Some((kind, name)) if kind.ends_with(".stoker.dev") => name,
        _ => text,
    };
    match name.is_empty() {
        true => Err("the name is empty".to_owned()),
        false => Ok(name.to_owned()),
    }
}

/// Runs `act` for each name, also after a failure. Prints the failures if there are several names.
/// Returns the exit code of the first name that did not succeed.
pub(crate) async fn for_each<N: fmt::Display>(
    names: &[N],
    output: Output,
    act: impl AsyncFn(&N) -> Result<u8, Failure>,
) -> Result<u8, Failure> {
    if let [name] = names {
        return act(name).await;
    }
    let mut first = 0;
    for name in names {
        let code = act(name).await.unwrap_or_else(|failure| {
            failure.print(Some(&name.to_string()), output);
            failure.code()
        });
        first = if first == 0 { code } else { first };
    }
    Ok(first)
}

/// Same as [`for_each`], with all names at the same time.
pub(crate) async fn for_all<N: fmt::Display>(
    names: &[N],
    output: Output,
    act: impl AsyncFn(&N) -> Result<u8, Failure>,
) -> Result<u8, Failure> {
    if let [name] = names {
        return act(name).await;
    }
    let codes = names.iter().map(async |name| {
        act(name).await.unwrap_or_else(|failure| {
            failure.print(Some(&name.to_string()), output);
            failure.code()
        })
    });
    let codes = futures::future::join_all(codes).await;
    Ok(codes.into_iter().find(|code| *code != 0).unwrap_or(0))
}

/// Same as [`for_each`], for commands that show objects: separates them in text and YAML.
pub(crate) async fn show_each<N: fmt::Display>(
    names: &[N],
    format: Format,
    show: impl AsyncFn(&N) -> Result<(), Failure>,
) -> Result<u8, Failure> {
    let is_first = Cell::new(true);
    let show = async |name: &N| {
        if !is_first.replace(false) {
            match format {
                Format::Yaml => print::out("---"),
                Format::Json => {}
                _ => print::out(""),
            }
        }
        show(name).await.map(|()| 0)
    };
    for_each(names, format.into(), show).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(words: &str, expected: Result<&[&str], &str>) {
        let words = words.split_whitespace().map(|word| parse_name(word).unwrap());
        let parsed = TrialNames { trials: words.collect() }.parse();
        match (parsed, expected) {
            (Ok(trials), Ok(expected)) => {
                let names: Vec<String> = trials.iter().map(TrialRef::to_string).collect();
                assert_eq!(names, expected);
            }
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (actual, expected) => panic!("{actual:?} is not {expected:?}"),
        }
    }

    #[test]
    fn trials_have_one_name() {
        check("mnist-3", Ok(&["mnist-3"]));
        check("mnist 3", Ok(&["mnist-3"]));
        check("mnist/3", Ok(&["mnist-3"]));
        check("trial.stoker.dev/mnist-3", Ok(&["mnist-3"]));
        check("a-b-12", Ok(&["a-b-12"]));
        check("mnist-0b3f9c1e 3", Ok(&["mnist-0b3f9c1e-3"]));
        check("mnist-0 1", Ok(&["mnist-0-1"]));
        check("mnist 0 1 other-2 third/3", Ok(&["mnist-0", "mnist-1", "other-2", "third-3"]));
    }

    #[test]
    fn other_names_are_refused() {
        check("mnist", Err("`mnist` is not a trial name; write EXPERIMENT-INDEX, such as mnist-0"));
        check("mnist-x", Err("`mnist-x` is not a trial name"));
        check("0 mnist-1", Err("`0` is not a trial name"));
        check("mnist/0 1", Err("`mnist/0 1` is not a trial name"));
        let large = "trial index 99999999999 is too large; use at most 4294967295";
        check("mnist-99999999999", Err(large));
        check("mnist 0 99999999999", Err(large));
        check("a/b/0", Err("`a/b/0` is not a trial name"));
    }

    #[tokio::test]
    async fn all_names_are_tried() {
        let check = async |names: &[&str], expected: Result<u8, u8>| {
            let tried = Cell::new(0);
            let act = async |name: &&str| {
                tried.set(tried.get() + 1);
                match *name {
                    "stopped" => Ok(3),
                    "unknown" => Err(Failure::Input(String::new())),
                    _ => Ok(0),
                }
            };
            let code = for_each(names, Output::Json, act).await.map_err(|failure| failure.code());
            assert_eq!((code, tried.get()), (expected, names.len()), "{names:?}");
            tried.set(0);
            let code = for_all(names, Output::Json, act).await.map_err(|failure| failure.code());
            assert_eq!((code, tried.get()), (expected, names.len()), "{names:?}");
        };
        check(&["a"], Ok(0)).await;
        check(&["unknown"], Err(2)).await;
        check(&["a", "unknown", "stopped", "b"], Ok(2)).await;
        check(&["stopped", "unknown"], Ok(3)).await;
    }
}
