//! Cross-crate tests, in one program that links once.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue panics")]

mod architecture;
mod chart;
mod exact;
mod examples;
mod faults;
mod first_light;
mod images;
mod inference;
mod interrupted;
mod language;
mod learner;
mod left_out;
mod links;
mod proxy;
mod readers;
mod repeated;
mod scenarios;
mod stores;
mod tutorial;
mod two_nodes;
mod weights;
