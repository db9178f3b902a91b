//! Activation functions as part of another operator.

use std::borrow::Cow;

use burn::tensor::{Tensor, activation};

use crate::array::Array;
use crate::chunks::{map_in_place, map_to_two, zip_map};
use crate::machine::vectorize;
use crate::vector::{normal_cdf, normal_density};

/// Function that a layer applies to its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// The output itself.
    Identity,
    /// `max(x, 0)`, and NaN for NaN.
    Relu,
    /// `x * cdf(x)` with the distribution function of the normal distribution, without the
    /// approximation by `tanh`.
    Gelu,
}

impl Activation {
    pub(crate) fn apply_burn<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Identity => x,
            Self::Relu => activation::relu(x),
            Self::Gelu => activation::gelu(x),
        }
    }

    /// Returns the values of the function, and what its derivative needs if `is_tracked`.
    pub(crate) fn apply(
        self,
        mut values: Vec<f32>,
        shape: &[usize],
        is_tracked: bool,
    ) -> (Array, Kept) {
        match self {
            Self::Identity => (Array::from_vec(values, shape), Kept::Nothing),
            Self::Relu => {
                map_in_place(&mut values, relu);
                Kept::relu(values, shape)
            }
            Self::Gelu if is_tracked => {
                let derivative = map_to_two(&mut values, gelu_and_derivative);
                let derivative = Array::from_vec(derivative, shape);
                (Array::from_vec(values, shape), Kept::Derivative(derivative))
            }
            Self::Gelu => {
                map_in_place(
                    &mut values,
                    #[inline(always)]
                    |x| gelu_and_derivative(x).0,
                );
                (Array::from_vec(values, shape), Kept::Nothing)
            }
        }
    }
}

/// Replaces each value by its ReLU.
pub(crate) fn apply_relu(values: &mut [f32]) {
    vectorize(
        #[inline(always)]
        || values.iter_mut().for_each(|value| *value = relu(*value)),
    );
}

#[inline(always)]
pub(crate) fn relu(x: f32) -> f32 {
    if x <= 0.0 { 0.0 } else { x }
}

#[inline(always)]
fn relu_gradient(gradient: f32, output: f32) -> f32 {
    if output <= 0.0 { 0.0 } else { gradient }
}

#[inline(always)]
fn gelu_and_derivative(x: f32) -> (f32, f32) {
    let cdf = normal_cdf(x);
    (x * cdf, cdf + x * normal_density(x))
}

#[inline(always)]
fn product(gradient: f32, derivative: f32) -> f32 {
    gradient * derivative
}

/// Values from which the derivative of the activation follows.
pub(crate) enum Kept {
    Nothing,
    ReluOutput(Array),
    Derivative(Array),
}

impl Kept {
    /// Returns the output of a ReLU, and what its derivative needs.
    pub(crate) fn relu(output: Vec<f32>, shape: &[usize]) -> (Array, Self) {
        let output = Array::from_vec(output, shape);
        (output.clone(), Self::ReluOutput(output))
    }

    /// Returns the gradient before the activation.
    pub(crate) fn gradient<'a>(&self, gradient: &'a [f32]) -> Cow<'a, [f32]> {
        match self {
            Self::Nothing => Cow::Borrowed(gradient),
            Self::ReluOutput(output) => {
                Cow::Owned(zip_map(gradient, output.values(), relu_gradient))
            }
            Self::Derivative(derivative) => {
                Cow::Owned(zip_map(gradient, derivative.values(), product))
            }
        }
    }

    /// Returns the gradient before the activation, of the part of the values that starts at
    /// `start`. Uses `scratch` if there is an activation.
    pub(crate) fn gradient_of_part<'a>(
        &self,
        start: usize,
        gradient: &'a [f32],
        scratch: &'a mut Vec<f32>,
    ) -> &'a [f32] {
        let end = start + gradient.len();
        match self {
            Self::Nothing => return gradient,
            Self::ReluOutput(output) => {
                zip_into(scratch, gradient, &output.values()[start..end], relu_gradient);
            }
            Self::Derivative(derivative) => {
                zip_into(scratch, gradient, &derivative.values()[start..end], product);
            }
        }
        scratch
    }
}

#[inline(always)]
fn zip_into(out: &mut Vec<f32>, left: &[f32], right: &[f32], function: impl Fn(f32, f32) -> f32) {
    out.resize(left.len(), 0.0);
    vectorize(
        #[inline(always)]
        || {
            for ((out, left), right) in out.iter_mut().zip(left).zip(right) {
                *out = function(*left, *right);
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_equal_with_and_without_a_gradient() {
        let values: Vec<f32> = (-4000..4000).map(|step| step as f32 / 500.0).collect();
        for activation in [Activation::Identity, Activation::Relu, Activation::Gelu] {
            let apply = |is_tracked| {
                let (output, _) = activation.apply(values.clone(), &[values.len()], is_tracked);
                output.values().iter().map(|value| value.to_bits()).collect::<Vec<_>>()
            };
            assert_eq!(apply(true), apply(false), "{activation:?}");
        }
    }
}
