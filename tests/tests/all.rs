//! Cross-crate tests, in one program that links once.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue panics")]

mod architecture;
mod browser;
mod bucket;
mod chart;
mod examples;
mod external;
mod faults;
mod images;
mod inference;
mod interrupted;
mod language;
mod learner;
mod links;
mod local_run;
mod mlflow;
mod page;
mod promotion;
mod proxy;
mod readers;
mod reproducibility;
mod scenarios;
mod scripts;
mod skipped;
mod standalone;
mod stores;
mod tensorboard;
mod tutorial;
mod two_nodes;
mod units;
mod weights;
